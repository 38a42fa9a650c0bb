"""The descriptor pool of the generated code, apart from protobuf's process-wide one."""

from google.protobuf import any_pb2
from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()
POOL.AddSerializedFile(any_pb2.DESCRIPTOR.serialized_pb)
