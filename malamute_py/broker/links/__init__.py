"""The clients that are connected: each one, its receivers, and all of them."""
