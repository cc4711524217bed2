"""PM-MoE: clients share the layers below the last, and each mixes everybody's last layers by a gate.

Feng, Geng, Zhu, Han, Yu, Xue, Luo, Sun, Zhang, Song, PM-MoE: Mixture of experts on private model parameters for
personalized federated learning, WWW 2025.

| paper | here |
|---|---|
| first stage: a method that splits the model in a shared and a private part | `train.*`: as in `fedper` |
| mixture of personalised modules: everybody's private parts as experts | `stages.heads.GatherHeads`, `client.heads` |
| gate over experts, the k largest count | `gate.top`: `client.gate.Gate` |
| energy-based denoising of experts | `gate.denoise`: who is less sure of a row than the own head does not count |
| only the gate is trained | `gate.epochs`, `gate.lr` |

Heads leave their clients: that is the method, and what `fedper` and `fedrep` avoid. They are gathered and gates are
trained whenever the fleet is evaluated; a client that has trained no head is served as in `fedper`.

Deviation: of the text only the abstract was at hand, and of the authors' program the mixture; by what energy an expert
counts as noise is decided here. The own head always counts, as in `scmoe`; the gate sees the input, not what the shared
layers make of it; weights of those that count are scaled to sum to 1.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.client.gate import FitGate, Gate
from shoal.client.heads import MixHeads, SendHead, mixed_heads_predict
from shoal.methods.composition.setting import Setting
from shoal.methods.fedper import fedper
from shoal.stages.heads import GatherHeads, heads_for
from shoal.stages.personalise import Personalise
from shoal.types import Method


def pm_moe(setting: Setting) -> Method:
    base = fedper(setting)
    fit = setting.make(
        "gate",
        FitGate,
        model=setting.model,
        gate=setting.make("gate", Gate, calibrate=False, denoise=True, shortlist=0),
    )
    gather = GatherHeads(SendHead(), setting.rounds, setting.eval_every)
    mix = Personalise(MixHeads(fit), heads_for, setting.rounds, setting.eval_every)
    return replace(
        base,
        name="pm-moe",
        stages=(*base.stages, gather, mix),
        models_for=heads_for,
        predict=mixed_heads_predict(fit),
    )
