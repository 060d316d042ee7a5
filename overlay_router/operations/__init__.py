"""Operations as resources at a router: one table of rows, and a role that decides about them."""
