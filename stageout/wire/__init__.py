"""Messages that cross a process boundary: hand-off, reports, orders, receipts."""
