"""What is asked for and what is given: values, checked when they are made. Everybody may import them."""
