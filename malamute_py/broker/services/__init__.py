"""Services: requests that wait in queues, and the workers that they are handed to."""
