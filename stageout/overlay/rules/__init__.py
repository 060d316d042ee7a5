"""The rules of operations: pure functions of frozen records. No file, socket, clock or database is used here."""
