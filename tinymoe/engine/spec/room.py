"""Where drafts find room in a step: in the tokens and pages that everybody else has left."""

from tinymoe.cache.blocks import BlockManager
from tinymoe.core.sequence import Chunk


def with_drafts(chunks: list[Chunk], budget: int, blocks: BlockManager) -> list[Chunk]:
    """Lengthen chunks that decode by as many drafts (seq.num_drafts) as the step's token budget and the pool allow.

    A draft is a bet: it never takes a token from a prompt nor a page from a sequence, and if the pool cannot even serve the
    chunks themselves they come back as they are. The first come are served first.
    """
    if not any(chunk.seq.num_drafts for chunk in chunks):
        return chunks
    own, drafts = (sum(c.stop - c.start for c in chunks), sum(c.seq.num_drafts for c in chunks))
    budget -= own
    free, size = blocks.pool.num_free, blocks.block_size
    # At most: begun blocks, one more for each chunk that begins in the midst of one, one for a copy of that.
    if free < 4 * len(chunks) + (own + drafts) // size:
        free = blocks.room(chunks)
        if free < 0:
            return chunks
    longer = []
    for chunk in chunks:
        seq, start, stop, samples = chunk
        if seq.num_drafts and samples and stop - start == 1 and not seq.forks:
            have = blocks.blocks_for(stop)
            drafts = max(0, min(seq.num_drafts, budget, (have + free) * size - stop))
            budget -= drafts
            free -= blocks.blocks_for(stop + drafts) - have
            chunk = Chunk(seq, start, stop + drafts, True)
        longer.append(chunk)
    return longer
