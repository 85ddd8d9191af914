"""How records travel. A transport has `start(call)`, `wait(call)`, `close()` and nothing else that a channel uses."""
