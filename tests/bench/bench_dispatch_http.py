"""20,000 deliveries from PostgreSQL through the whole dispatcher to a fake that answers after 50 ms: http."""

from pushd.model import Channel
from tests.bench.dispatching import one_channel

if __name__ == "__main__":
    one_channel("dispatch-http", Channel.HTTP, {"ratio_to_bound": 0.30})
