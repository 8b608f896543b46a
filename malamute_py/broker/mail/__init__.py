"""Mailboxes: messages that wait, and the inboxes that read them."""
