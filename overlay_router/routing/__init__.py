"""Links between routers, what they can do, and the routes that follow."""
