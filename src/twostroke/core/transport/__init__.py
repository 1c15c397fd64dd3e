"""Messages over sockets between processes of Twostroke: framing, encoding, and handshakes.

A `MessageFormat` (frames.py) says how messages are encoded and which are accepted. A `Connection`
sends and receives them in threads, with timeouts and large buffers; an `EventLoopConnection` does
so in an event loop. A `Listener` accepts connections and `connect` makes them (listener.py), after
a handshake that proves a secret. Errors are a `ConnectionLostError`.

Three packages use this one, and keep their own messages and policies: `engine/process` (a server
and its engine process), `backends/parallel` (rank 0 and other ranks) and `engine/disaggregation`
(prefill and decode engines, and an engine and its NIXL process). The first message of each of their
protocols has a version: a number between engines, the installed package and its kernels between
ranks. Each package decides which differences matter.

Data that no Python code reads is not sent by this package. Ranks exchange values in memory that
they share, or by UCX or Gloo (`backends/parallel/links`), and engines copy KV pages in shared
memory or by NIXL (`engine/disaggregation/transfer_methods.py`). A socket would add copies and
system calls. The router and its replicas speak HTTP (`fleet/router`), as any client does.
"""
