"""The commands. Thin: each reads its arguments, calls one function of the program, and prints."""
