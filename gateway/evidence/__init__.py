"""Evidence: what was measured on which server, and whether that may be relied on now.

This file imports nothing, so that the vLLM side loads alone.

Inside vLLM, standard library only: `attest` (the middleware), `effective` and `fields` (the configuration document), `host`
(versions, hardware), `model_files` (digests, tokenizer), `plain_json` (canonical JSON).
In the gateway: `identity`, `stock`, `identity_client` (who a backend is), `record`, `canonical`, `schema` (what was measured),
`target`, `judge`, `states`, `verdict`, `checklist` (what follows from it), `store`, `signing` (keeping it), `lab` (examples).

The ideas behind it, and where each lives:

- An answer proves one request. A decision holds for the measured slice only: `record.Slice`, `verdict.envelope_slices`.
- Four layers stay apart: `Record.capabilities`, `Record.configuration`, `Record.slices`, and the decision in `Verdict` alone.
- Identity is four fields, not an alias; the served name stays outside the hash: `record.RecordIdentity`, `attest`.
- Another configuration is another record; nothing is edited in place: `store`, `signing.supersede`.
- Memory and scheduling regimes do not transfer: `fields` hashes cache, scheduler and length; `verdict` compares KV cache sizes.
- A mechanism (batching, chunked prefill, prefix caching) is a capability and proves no capacity; a slice that a warm cache
  helped says so in `prefix_reuse` and counts only where production has that reuse: `judge.contains`.
- Parallelism is several numbers: the `parallelism` group of `fields`, the trigger of that name in `identity.trigger_of`.
- The effective configuration is hashed, not the command line: `effective.configuration`, `plain_json.digest`.
- Capacity belongs to input, output and concurrency together: `judge.contains`, `judge.covering`. Outside it: DEFER.
- Warm-up is completed, omitted or unknown, and unknown is not enough: `record.Protocol`, rule 2 of `verdict`.
- p50, p95, queue and throughput are separate answers; errors and timeouts have limits of their own: `record.Level`, `judge`.
  The product sets the limits: `target.Limits`.
- Two configurations of one model are two servers: `identity.diff`; the transfer fixture of `lab`.
- An API key is no boundary for the whole server: `record.BoundaryNote`, judged by itself in rule 5 of `verdict`.
- The order provenance, measurement, slice, service, boundary, and typed reasons: `verdict`, `states`.
- Triggers are named before they are needed: `record.Trigger`, `Verdict.triggers`; what changed and what was rebuilt: `signing`.
- The questions to ask before a PASS: `checklist`. A well-founded DEFER is a result.
"""
