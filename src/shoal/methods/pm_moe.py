"""PM-MoE: clients share the layers below the last, and each client mixes the last layers of all clients by a gate.

Feng, Geng, Zhu, Han, Yu, Xue, Luo, Sun, Zhang, Song, PM-MoE: Mixture of experts on private model parameters for
personalized federated learning, WWW 2025.

| paper | here |
|---|---|
| first stage: a method that splits the model in a shared and a private part | `train.*`: as in `fedper` |
| mixture of personalised modules: all private parts as experts | `stages.heads.GatherHeads`, `client.heads` |
| gate over experts, the k largest count | `gate.top`: `client.gate.Gate` |
| energy-based denoising of experts | `gate.denoise`: experts less confident than the own head are ignored |
| only the gate is trained | `gate.epochs`, `gate.lr` |

Heads leave their clients: this is the idea of the method, and what `fedper` and `fedrep` avoid. Heads are collected and
gates are trained whenever the fleet is evaluated. A client that has trained no head is served as in `fedper`.

Deviations from the paper
-------------------------
- Source: only the abstract of the paper and the mixture of the authors' program were available. The energy by which an
  expert counts as noise is our choice.
- Own head: it always counts, as in `scmoe`.
- Gate input: the gate sees the input, not the output of the shared layers.
- Weights: the weights of the experts that count are scaled to sum to 1.
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
    """Builds the method with the options of the setting."""
    base = fedper(setting)
    fit = setting.make(
        "gate",
        FitGate,
        model=setting.model,
        gate=setting.make("gate", Gate, calibrate=False, denoise=True, shortlist=0),
    )
    gather = GatherHeads(SendHead(setting.model), setting.rounds, setting.eval_every)
    mix = Personalise(MixHeads(fit), heads_for, setting.rounds, setting.eval_every)
    return replace(
        base,
        name="pm-moe",
        stages=(*base.stages, gather, mix),
        models_for=heads_for,
        predict=mixed_heads_predict(fit),
    )
