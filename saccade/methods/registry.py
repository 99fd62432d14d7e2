"""The registry of methods. Adding one to the package: its file, one line here, one row of the test matrix, one line of
docs. Methods from outside the package come by :mod:`saccade.methods.outside`."""

from __future__ import annotations

from saccade.methods.arkvale import ArkVale
from saccade.methods.auto import Auto
from saccade.methods.base import Method, PolicyPart
from saccade.methods.cis import CIS
from saccade.methods.dense import DenseMethod
from saccade.methods.eviction import AdaKV, SnapKV
from saccade.methods.flashprefill import FlashPrefill
from saccade.methods.flexprefill import FlexPrefill
from saccade.methods.infllm import InfLLM
from saccade.methods.lfps import LFPS
from saccade.methods.locks import Locks
from saccade.methods.loopserve import LoopServe
from saccade.methods.lossless import Lossless
from saccade.methods.minference import MInference
from saccade.methods.prehoc import ETF, PSAW
from saccade.methods.psa import PSA
from saccade.methods.quest import Quest
from saccade.methods.random_choice import RandomChoice
from saccade.methods.rocketkv import RocketKV
from saccade.methods.sampled_rows import SampledRows
from saccade.methods.shapes import AShape, TriShape
from saccade.methods.streaming import Streaming
from saccade.methods.topk import TopK
from saccade.methods.topp import TopP
from saccade.methods.twilight import Twilight
from saccade.methods.vattention import VAttention
from saccade.methods.xattention import XAttention

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        AdaKV,
        AShape,
        ArkVale,
        CIS,
        DenseMethod,
        FlashPrefill,
        FlexPrefill,
        InfLLM,
        LFPS,
        Locks,
        LoopServe,
        MInference,
        PSA,
        Quest,
        RandomChoice,
        RocketKV,
        SampledRows,
        SnapKV,
        Streaming,
        TopK,
        TopP,
        TriShape,
        Twilight,
        VAttention,
        XAttention,
    )
}

# What joins a method in a policy: windows and freezes.
MODIFIERS: dict[str, type[PolicyPart]] = {part.name: part for part in (ETF, PSAW)}

# What runs by other methods: one that verifies what another drafts, and the name for what is settled later.
AROUND: dict[str, type[Method]] = {method.name: method for method in (Auto, Lossless)}

KNOWN: dict[str, type[PolicyPart]] = {**METHODS, **MODIFIERS, **AROUND}

# Of the package saccade-contrib; where it is not installed, policies that name them are refused with that.
IN_CONTRIB = ("double_sparsity", "h2o", "hshare", "infinigen", "magicpig")

# Names for policies, or for sums that join others; every method's own name is one already.
PRESETS: dict[str, str] = {"cpe": "cis+psaw+etf"}
