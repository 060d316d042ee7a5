"""Messages and addresses of the overlay, as they travel. No I/O."""
