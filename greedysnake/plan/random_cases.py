"""Ways to do a step, drawn at random: what a search is checked against."""

import random

from greedysnake.plan.activations import BatchShape
from greedysnake.plan.query import Case, PlanQuery, smaller_groups
from greedysnake.plan.slots import SLOTS, with_slots
from greedysnake.schedule import Choices, Tier

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def random_case(query: PlanQuery, sequences: int, rng: random.Random) -> Case:
    """Any way of doing a batch of so many sequences, whether or not it fits.

    Args:
        query: what is asked.
        sequences: of the step.
        rng: source of randomness.
    """
    rows = rng.choice([rows for rows in range(1, sequences + 1) if sequences % rows == 0])
    separate = query.hardware.separate_device
    alpha = rng.choice([0.0, 0.1, 0.25, 0.4, 0.5, 0.75, 1.0])
    on_device = rng.choice(_SHARES) if separate else 0.0
    choices = Choices(
        delayed_share=alpha,
        wait_for_norm=query.clipping and alpha < 1,
        separate_device=separate,
        boundaries_on_device=on_device,
        boundaries_on_ssd=rng.choice([share for share in _SHARES if share <= 1 - on_device]),
        boundaries_first=rng.choice([True, False]),
        kept_activations=rng.choice(_SHARES),
        gradients=rng.choice([Tier.HOST, Tier.SSD]),
        group_size=rng.choice([None, None, *smaller_groups(sequences // rows)]),
        resident_weights=rng.choice(_SHARES),
        resident_state=rng.choice(_SHARES),
    )
    return Case(
        batch=BatchShape(micro_batches=sequences // rows, rows=rows, tokens=query.tokens),
        layers_per_unit=rng.choice([1, 2, 3]),
        choices=with_slots(choices, rng.choice(SLOTS)),
    )
