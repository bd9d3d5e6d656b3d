"""Write a trained model for other programs, and read theirs: Hugging Face and llama.cpp formats."""
