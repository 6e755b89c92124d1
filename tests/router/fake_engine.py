"""RoutedEngine: the fake engine with what the router's service asks for beside."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.kv.events import BlockFeed, Stored
from engine.kv.prefix import PrefixIndex
from loader.checkpoint import open_checkpoint
from tests.rpc.fake_engine import FakeEngine


class RoutedEngine(FakeEngine):
    """Its prefix index is a real one that the test fills."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.checkpoint: Any = open_checkpoint(model)
        self.tokenizer: Any = self.checkpoint.load_tokenizer()
        self.config = SimpleNamespace(max_num_seqs=8, kv_cache_dtype="int8")
        self.index = PrefixIndex()
        self.flushed: list[str | None] = []

    async def follow_blocks(self, feed: BlockFeed) -> list[Stored]:
        return self.index.follow(feed)

    async def reset_prefix_cache(self, tenant: str | None = None) -> bool:
        self.flushed.append(tenant)
        return True
