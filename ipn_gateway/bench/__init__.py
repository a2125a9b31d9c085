"""The benchmark: what the gateway does in a second, beside the limit of the machine and beside what a user would pick instead.

One module per comparison, in `CATALOGUE` of `comparisons`; `comparison` is their one shape and `runner` their one runner. `stage` starts
what they need, `house` is a gateway with its merchants, `load` posts, `wire` is the other side.
"""
