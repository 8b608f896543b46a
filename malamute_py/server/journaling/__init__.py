"""The journal beside the loop: its rings and the threads that work on them."""
