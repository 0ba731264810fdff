"""The embeddings of pictures on the device: which pictures have pages of the pool, and which of them a step encodes.

A picture is found by its digest, under the cache salt of its request: a request learns as little from the time of an
encode as from the time of a prefix that was computed before.

A picture is held for one step, by the plan that reads it, and for no longer: between two steps every picture may be
evicted, the least recently read one first. So there is nothing to give back when a sequence is preempted, aborted or
ends in the middle of a picture. A sequence that goes on there asks again, finds the picture or has it encoded anew. The
device runs steps in order, so an encode of a later step overwrites nothing that an earlier one has yet to read.

Host memory keeps the embeddings of the last pictures that were encoded, if it has room (`HostEmbeddings` of the
runner): so a picture that was evicted is loaded instead of encoded again. What it keeps is decided here, too: a plan
names what is kept, loaded and forgotten, and two lists that could differ do not exist.

Progress: the first prompt in order asks first, when nothing is held, and the pool has room for each picture that
`check_fits` lets pass. So it gets at least the picture that its next token needs, in each step.
"""

import collections
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.api import Request, shown_id
from jaxserve.errors import RequestRejected
from jaxserve.sched.draft import DraftChunk
from jaxserve.sched.plan import Encode, EncoderPool, PicturePlace
from jaxserve.sched.state import Sequence
from jaxserve.values.content import Picture, salts_agree


class _Key(NamedTuple):
    salt: str
    digest: bytes


class _Kept(NamedTuple):
    host_id: int
    num_embeddings: int


class EncoderCache:
    """Pages 1..num_pages of the encoder's pool. Mutated only by the scheduler that made it.

    Attributes:
      num_queries, num_hits: pictures that prompts came to, and those of them that had their embeddings.
      num_encodes, num_encoded_patches: of plans so far.
      num_loads: pictures that came from host memory instead.
      num_evicted: pictures that gave their pages up to others.
      num_kept: embeddings in host memory now.
      keeps: whether host memory takes anything in. See `switch_host`.
    """

    def __init__(self, pool: EncoderPool) -> None:
        self.pool = pool
        self.num_queries = self.num_hits = self.num_encodes = self.num_encoded_patches = self.num_evicted = 0
        self.num_loads = self.num_kept = 0
        self.keeps = pool.host_embeddings > 0
        self._free = list(range(pool.num_pages, 0, -1))  # a stack, low ids first
        self._pages: collections.OrderedDict[_Key, tuple[int, ...]] = collections.OrderedDict()  # least recent first
        self._held: set[_Key] = set()
        self._unread: set[_Key] = set()  # encoded, and read by no plan yet
        self._encodes: list[Encode] = []
        self._num_patches = 0  # of `_encodes`
        self._kept: collections.OrderedDict[_Key, _Kept] = collections.OrderedDict()  # in host memory, as `_pages`
        self._drops: list[int] = []  # for the next encode that keeps
        self._last_host_id = 0

    @property
    def num_used(self) -> int:
        """Pages with embeddings."""
        return self.pool.num_pages - len(self._free)

    @property
    def num_pictures(self) -> int:
        """Pictures that have their embeddings."""
        return len(self._pages)

    def check_fits(self, request: Request) -> None:
        """Raises RequestRejected for a picture that could never have room."""
        for number, (picture, _) in enumerate(request.pictures, start=1):
            if self.pool.pages_of(picture.num_tokens) > self.pool.num_pages:
                room = self.pool.num_pages * self.pool.page_size
                name = shown_id(request.request_id)
                raise RequestRejected(
                    f"picture {number} of request {name!r} has {picture.num_tokens} tokens, but the pool "
                    f"of the encoder holds {room}; send a smaller one"
                )

    def begin_step(self) -> None:
        """A plan is begun: it holds nothing yet."""
        assert not self._encodes, "a plan with encodes was not finished"
        self._held.clear()

    def hold(self, seq: Sequence, start: int, length: int) -> int:
        """Lets the plan read the pictures of `length` tokens from `start` on; those that are not there it encodes.

        Returns how many tokens it can feed: all, or those before a picture that it cannot have, since the step encodes
        enough already, or holds the pages.
        """
        for placed in seq.request.pictures:
            if placed.end <= start:
                continue
            if placed.start >= start + length:
                break
            key = _Key(seq.request.cache_salt, placed.picture.digest)
            if key not in self._pages and not self._encode(key, placed.picture):
                return max(0, placed.start - start)
            self._pages.move_to_end(key)
            self._held.add(key)
            if key in self._kept:
                self._kept.move_to_end(key)
        return length

    def finish_step(self, chunks: Iterable[DraftChunk]) -> tuple[tuple[Encode, ...], tuple[PicturePlace, ...]]:
        """The encodes of the plan whose chunks these are, and where its pictures are."""
        places: list[PicturePlace] = []
        for seq, start, end in [(chunk.seq, chunk.seq.num_fed, chunk.seq.num_fed + chunk.length) for chunk in chunks]:
            for placed in seq.request.pictures:
                if placed.end <= start or placed.start >= end:
                    continue
                key = _Key(seq.request.cache_salt, placed.picture.digest)
                assert key in self._held, f"{placed} of {seq} is read without being held"
                places.append(PicturePlace(seq.row, placed.start, placed.picture.num_tokens, self._pages[key]))
                if placed.start >= start or start == seq.num_cached:
                    self.num_queries += 1
                    self.num_hits += key not in self._unread
                self._unread.discard(key)
        encodes, self._encodes, self._num_patches = tuple(self._encodes), [], 0
        num_loads = sum(encode.load for encode in encodes)
        self.num_loads += num_loads
        self.num_encodes += len(encodes) - num_loads
        self.num_encoded_patches += sum(encode.num_patches for encode in encodes)
        return encodes, tuple(places)

    def flush(self, salt: str | None) -> None:
        """Forgets the pictures of requests with this cache salt, or all. Between two steps."""
        for key in [key for key in self._pages if salt is None or salts_agree(key.salt, salt)]:
            self._forget(key)
        for key in [key for key in self._kept if salt is None or salts_agree(key.salt, salt)]:
            self._drop(key)

    def switch_host(self, enabled: bool) -> None:
        """Whether host memory takes embeddings in from now on. Off, it forgets all. Between two steps."""
        self.keeps = enabled and self.pool.host_embeddings > 0
        if not enabled:
            for key in [*self._kept]:
                self._drop(key)

    def _encode(self, key: _Key, picture: Picture) -> bool:
        kept = self._kept.get(key)
        if kept is None and self._num_patches and self._num_patches + picture.num_patches > self.pool.max_patches:
            return False
        num_pages = self.pool.pages_of(picture.num_tokens)
        # Those that are held were moved to the end when they were, so eviction meets them last.
        held = sum(len(self._pages[one]) for one in self._held)
        if num_pages > self.pool.num_pages - held:
            return False
        while len(self._free) < num_pages:
            self._forget(next(iter(self._pages)))
            self.num_evicted += 1
        self._pages[key] = page_ids = tuple([self._free.pop() for _ in range(num_pages)])
        if kept is not None:
            self._encodes.append(Encode.of(picture, page_ids, host_id=kept.host_id, load=True))
            return True
        self._unread.add(key)
        host_id = self._keep(key, picture.num_tokens)
        drops, self._drops = tuple(self._drops), []
        self._encodes.append(Encode.of(picture, page_ids, host_id=host_id, drops=drops))
        self._num_patches += picture.num_patches
        return True

    def _keep(self, key: _Key, num_embeddings: int) -> int:
        """The number under which host memory keeps a picture that is encoded now; 0: it does not."""
        room = self.pool.host_embeddings
        if not self.keeps or num_embeddings > room:
            return 0
        while self.num_kept + num_embeddings > room:
            self._drop(next(iter(self._kept)))
        self._last_host_id += 1
        self._kept[key] = _Kept(self._last_host_id, num_embeddings)
        self.num_kept += num_embeddings
        return self._last_host_id

    def _drop(self, key: _Key) -> None:
        host_id, num_embeddings = self._kept.pop(key)
        self._drops.append(host_id)
        self.num_kept -= num_embeddings

    def _forget(self, key: _Key) -> None:
        self._free += reversed(self._pages.pop(key))
        self._held.discard(key)
        self._unread.discard(key)

    def check(self) -> None:
        """Proves that each page is free or of one picture."""
        used = [page_id for pages in self._pages.values() for page_id in pages]
        assert sorted([*used, *self._free]) == list(range(1, self.pool.num_pages + 1)), (self._pages, self._free)
        assert self._held | self._unread <= self._pages.keys(), (self._held, self._unread)
        assert self.num_kept == sum(kept.num_embeddings for kept in self._kept.values()), self._kept
        assert self.num_kept <= self.pool.host_embeddings, (self._kept, self.pool)
        host_ids = [*self._drops, *(kept.host_id for kept in self._kept.values())]
        assert len(set(host_ids)) == len(host_ids), (self._kept, self._drops)
