"""KvEventBatches: block events as the numbered batches of one subscription.

A subscription begins with a snapshot: a `cleared`, then all that is cached, in chunks of consecutive
numbers; what changes afterwards continues the numbers without a gap. Numbers mean nothing outside
their subscription, so there is no resuming one.
"""

import time
from array import array
from collections.abc import Sequence

from smg_grpc_proto.generated import common_pb2 as pb

from engine.kv.events import BlockEvent, BlockNames, Stored

CHUNK_BLOCKS = 1024
"""Blocks in a chunk of the snapshot: 16 tokens each make about 70 KiB, far below the 4 MiB of a message."""


class KvEventBatches:
    """Names, groups and numbers the events of the blocks under `root`."""

    def __init__(self, root: str, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._names = BlockNames(root)
        self._last_sequence = 0
        self._last_event = 0

    def snapshot(self, contents: Sequence[Stored]) -> list[pb.KvEventBatch]:
        """The batches that replace what the router knows by `contents`. Slow when there are many; any thread."""
        chunks = []
        for start in range(0, max(len(contents), 1), CHUNK_BLOCKS):
            chunk = self._next_batch()
            if start == 0:
                chunk.events.add().cleared.SetInParent()
            self._add(chunk, contents[start : start + CHUNK_BLOCKS])
            chunks.append(chunk)
        blocks = sum(len(event.stored.blocks) for chunk in chunks for event in chunk.events)
        for index, chunk in enumerate(chunks):
            chunk.snapshot.CopyFrom(pb.KvSnapshotChunk(index=index, count=len(chunks), blocks=blocks))
        return chunks

    def changes(self, events: Sequence[BlockEvent]) -> pb.KvEventBatch | None:
        """The batch of what changed; None when nothing under the root did."""
        batch = self._next_batch()
        self._add(batch, events)
        if batch.events:
            return batch
        self._last_sequence -= 1
        return None

    def _next_batch(self) -> pb.KvEventBatch:
        self._last_sequence += 1
        return pb.KvEventBatch(sequence_number=self._last_sequence, timestamp=time.time())

    def _add(self, batch: pb.KvEventBatch, events: Sequence[BlockEvent]) -> None:
        """Add events, a chain of blocks as one `stored` and neighbouring removals as one `removed`."""
        message, tail = pb.KvCacheEvent(), None
        for event in events:
            if isinstance(event, Stored):
                name = self._names.store(event)
                if name is None:
                    continue
                if tail is None or event.parent != tail:
                    message = self._add_event(batch)
                    if event.parent != self._root:
                        message.stored.parent_block_hash = self._names.name(event.parent)
                token_ids = array("i", event.tokens)
                message.stored.blocks.add(block_hash=name, token_ids=token_ids, block_size=self._block_size)
                tail = event.uid
            elif (name := self._names.remove(event)) is not None:
                if tail is not None or message.WhichOneof("data") != "removed":
                    message, tail = self._add_event(batch), None
                message.removed.block_hashes.append(name)

    def _add_event(self, batch: pb.KvEventBatch) -> pb.KvCacheEvent:
        self._last_event += 1
        return batch.events.add(event_id=self._last_event)
