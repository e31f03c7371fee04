"""Flow control: which request goes to which backend, when, and why not. The maths; the code is in the modules.

**Shapes and boxes.** A request r has task t, features φ, input i and output o tokens per sequence, and s sequences. A
qualified slice is a box B with a task, features, ranges of i and o, and a concurrency C. B contains r when the task is
the same, φ ⊆ φ(B), and i and o lie in its ranges. A backend's envelope is a union of boxes, numbered by falling C.

**The rule.** With F in flight, r may go when some box B contains r and every f in F, Σs(F) + s(r) ≤ C(B), and the blocks
Σ s·⌈(i + o) / block⌉ of F and r fit the KV budget, when one is known. For every box the number out(B) of requests in
flight that it does *not* contain is kept; possible = {B : out(B) = 0} is a bitmask, so the rule is
C(lowest bit of mask(r) & possible) ≥ Σs + s(r): a few integer operations, nothing recomputed.

**Cost.** A grant costs tokens × κ, tokens = s·(i + o), κ = C(widest box) / C(widest box that contains r) ≥ 1: a request
that forces the engine down to a narrow box is charged the concurrency the others lose. At settlement
cost × (1 − used / reserved) is refunded.

**Fair order over tenants.** Each tenant k has a virtual time v(k), each priority level of a pool a clock V (start-time
fair queueing). A tenant that begins to wait gets v = max(v, V). The next grant goes to the least v(k), V := max(V, v(k)),
v(k) += cost / weight(k). V never runs backwards. Two tenants that both wait through an interval have
|cost(j)/w(j) − cost(k)/w(k)| ≤ max cost / w(j) + max cost / w(k), plus the refunds of what is still in flight. A pool is
a set of backends connected by common candidates: virtual time is not compared between engines that share nothing.

**Inside one tenant**, the smallest size class first (powers of four of the cost), then arrival. The oldest is passed at
most 4 times while it is the oldest; then it is next. So the n-th oldest waits at most 5·n grants of its tenant, and short
ones are not trapped behind a long.

**Mixed boxes.** The first in fair order may find no room while others fit (a tight request under a stream of small
ones). Others may pass it K = 8 times; then room is held for it on *one* backend, the one with least to drain,
min over its boxes of max(out(B), Σs + s − C(B)). Nothing is granted there until it fits; all else goes on elsewhere. It
therefore waits at most K grants and the time in which what was in flight drains. Apart from held room the queue is
work-conserving: whenever a waiting request fits, some waiting request is granted. (Under a binding KV budget each lane
tries the next request of eight tenants, not every one.)

**Classes.** A lower class goes only where no more urgent request waits: for each lane of the urgent class one backend is
left alone. So within one slice an urgent request waits at most for one running request of a lower class. The exception
is stated: a lower class whose oldest has waited half of its time gets one grant in twenty while an urgent one waits.

**Lanes.** Waiting requests with the same candidates, the same masks and the same s form a lane: whether they fit is one
question. A pick costs O(lanes) plus the logarithm of what waits.

**Bounds.** The queue is bounded in requests and tokens. When it is full a newcomer displaces the newest request of the
tenant with most waiting for its weight in the least urgent class, if that is worse off than the newcomer itself; so a
flood fills the queue with its own requests only. The wait of a newcomer is estimated from below, (cost of more urgent
levels + min(level, what goes before it in its tenant × Σw / w)) / drain rate; longer than its patience means a refusal on
arrival. The drain rate is cost released per second of backlog, forgotten over ten seconds.

**Ends.** Each request has exactly one: a grant that is settled once, a refusal, or a departure. A grant made in the
instant its caller left is given back. Time is an argument everywhere; the controller alone knows asyncio.
"""
