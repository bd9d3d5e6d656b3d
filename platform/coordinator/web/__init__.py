"""The pages: views, forms, template tags."""
