"""The entry point of the backend `cute`: importing this module registers the backend.

torch's lookup loads this entry point in every thread that asks for the backend before it is registered, and
each thread then registers what it loaded, which raises in all but the first. A module is imported once,
however many threads ask for it. So the module registers the backend, and what the threads load is None, of
which torch's `register_backend` makes a decorator and registers nothing. When they look again, it is there.
"""

from torch._dynamo.backends.registry import register_backend

from cute_backend.backend import cute

register_backend(cute, name="cute")

registered = None
