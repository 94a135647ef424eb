"""Publication: from flushed shards to one compare-and-swap of the run's pointer. PROTOCOL.md is the specification.

rules.py        pure: what the pointer may become, what a read-back proves, what an attempt needs next
writes.py       the one place that sends conditional writes and resolves unclear ones
ownership.py    the epoch of this process in each run; notices when another process takes over
sealing.py      pure: member report, close record and manifest from journal records
restoretest.py  what a candidate must pass: formats, then every byte as the store holds it
loading.py      the level `load`: a command of the user's on a restored copy
promotion.py    the pointer's move to a tested candidate
settings.py     how this daemon publishes, and whose reports it waits for
joining.py      pure: which save of a member belongs to which attempt, who reads which shard
members.py      a member's part: join attempts, hear of their close
finding.py      ... before that: find them
answering.py    ... and its answers: report, share of the restore test, what became of the attempt
joined.py       what both leave in the journal
wishes.py       how a member asks the owner for an attempt, and which wishes of others are due
collecting.py   the owner's part: open what others ask for, take over, end
reports.py      ... and count the reports
sharing.py      the restore test of several members
looking.py      the task that looks at the bucket, at the pace of pace.py
steps.py        the effects of one attempt, one step at a time
publisher.py    the background task
"""
