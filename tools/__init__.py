"""Programs of development, none of which is in the wheel."""
