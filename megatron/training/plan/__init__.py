"""What a run would take, found out without running it: memory, communication, bubble.

`rank` builds the real model and optimizer of any rank without memory and sends one micro-batch
through each of its chunks under `tracing`; `memory` and `communication` make sums of that, `cure`
looks for the change that makes a run fit, and `report` says it.
"""
