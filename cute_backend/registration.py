"""The entry point of the backend `cute`: importing this module registers the backend.

torch's lookup loads this entry point in every thread that asks for the backend before it is registered, and
each thread then registers what it loaded, which raises an error in all but the first. A module, however, is
imported once, even if several threads import it. So importing this module registers the backend, and the
object that the threads load is None, for which torch's `register_backend` returns a decorator and registers
nothing. When the threads look again, the backend is there.
"""

from torch._dynamo.backends.registry import register_backend

from cute_backend.backend import cute

register_backend(cute, name="cute")

registered = None
