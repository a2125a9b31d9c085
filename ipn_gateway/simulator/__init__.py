"""A local SSLCOMMERZ and a local subscriber, both of which misbehave on request: demo, test double and sandbox.

Nothing here touches the gateway's database or use cases; `app.create_app` and `subscriber.create_subscriber` are the
two applications, `serving.serving` runs one on a loopback socket.
"""
