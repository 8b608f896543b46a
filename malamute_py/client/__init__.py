"""The client: a sans-IO session under an asyncio and a sync shell."""
