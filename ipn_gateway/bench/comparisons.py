"""All comparisons, in the order in which they are run."""

from typing import Final

from ipn_gateway.bench import duplicates, growth, intake, isolation, keyed, latency, limit, memory, outbound, plain, statements

CATALOGUE: Final = {
    module.COMPARISON.name: module.COMPARISON
    for module in (isolation, limit, intake, plain, duplicates, outbound, keyed, latency, statements, growth, memory)
}
