"""The names and limits that the client and the server must share."""

SERVICE = "duck.v1.Duck"
DESCRIBE_METHOD = f"/{SERVICE}/Describe"
FORWARD_METHOD = f"/{SERVICE}/Forward"

# 256 MiB: 18,000 rows of 7168 bf16, several times a full prefill chunk. gRPC's own
# default of 4 MiB breaks at 293 rows.
MAX_MESSAGE_BYTES = 256 * 2**20

# Of a duck, at once; more get RESOURCE_EXHAUSTED. With grpcio each holds a thread as
# long as it lives.
MAX_CONCURRENT_CALLS = 64

# In the headers that a Forward stream opens with, see identity.py.
IDENTITY_METADATA_KEY = "duck-identity"

# The metadata key of the shared secret, and how its value starts.
TOKEN_METADATA_KEY = "authorization"
TOKEN_PREFIX = "Bearer "
