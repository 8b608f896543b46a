"""RabbitMQ: its server, Python clients of queues and of streams, and a C client."""
