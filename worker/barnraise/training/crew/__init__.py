"""A crew: several machines that train as one author, each with a part of the model."""
