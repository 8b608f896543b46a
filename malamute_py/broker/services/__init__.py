"""Services: requests that wait, and the workers that they are handed to."""
