"""The stream of samples from targets to trainers: credit-based ZeroMQ, see sender.py and receiver.py."""

from torchspec_lite.peer import StreamError, StreamTimeout
from torchspec_lite.receiver import Receiver
from torchspec_lite.sample import Expectation, Sample, SampleError
from torchspec_lite.sender import Sender
from torchspec_lite.stream_stats import Event, ReceiverStats, Refusal, SenderStats
from torchspec_lite.wire import WireError

__all__ = ["Event", "Expectation", "Receiver", "ReceiverStats", "Refusal", "Sample", "SampleError", "Sender",
           "SenderStats", "StreamError", "StreamTimeout", "WireError"]
