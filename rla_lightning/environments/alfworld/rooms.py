"""Rooms like ALFRED's: which receptacles a kitchen has, what lies around in a bathroom, how scenes are numbered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

Size = Literal["full", "small"]

UNSEEN_SCENES = range(1, 7)  # of each kind of room: those of valid_unseen, as in ALFRED
SEEN_SCENES = range(7, 31)  # those of train and valid_seen
FIRST_SCENE: Mapping[str, int] = {"kitchen": 0, "livingroom": 200, "bedroom": 300, "bathroom": 400}

_RECEPTACLES: Mapping[Size, Mapping[str, Mapping[str, tuple[int, int]]]] = {  # type -> least and most
    "full": {
        "kitchen": {
            "cabinet": (5, 14), "drawer": (3, 8), "countertop": (2, 3), "stoveburner": (2, 4), "fridge": (1, 1),
            "microwave": (1, 1), "sinkbasin": (1, 1), "garbagecan": (1, 1), "coffeemachine": (1, 1), "toaster": (0, 1),
            "diningtable": (0, 1), "shelf": (0, 3), "sidetable": (0, 1),
        },
        "livingroom": {
            "sofa": (1, 1), "armchair": (1, 2), "coffeetable": (1, 1), "sidetable": (1, 3), "drawer": (2, 6), "shelf": (0, 5),
            "tvstand": (1, 1), "garbagecan": (1, 1), "diningtable": (0, 1), "desk": (0, 1), "dresser": (0, 1), "ottoman": (0, 1),
            "safe": (0, 1), "cabinet": (0, 4),
        },
        "bedroom": {
            "bed": (1, 1), "desk": (1, 2), "dresser": (0, 1), "drawer": (3, 8), "shelf": (1, 6), "sidetable": (1, 2),
            "garbagecan": (1, 1), "laundryhamper": (0, 1), "armchair": (0, 1), "safe": (0, 1),
        },
        "bathroom": {
            "sinkbasin": (1, 2), "toilet": (1, 1), "cabinet": (2, 6), "countertop": (1, 1), "bathtubbasin": (0, 1),
            "towelholder": (1, 1), "handtowelholder": (1, 2), "toiletpaperhanger": (1, 1), "garbagecan": (1, 1),
            "shelf": (0, 2), "drawer": (0, 4), "cart": (0, 1),
        },
    },
    "small": {
        "kitchen": {
            "cabinet": (1, 2), "drawer": (1, 2), "countertop": (1, 1), "fridge": (1, 1), "microwave": (1, 1),
            "sinkbasin": (1, 1), "garbagecan": (0, 1), "diningtable": (0, 1),
        },
        "livingroom": {
            "sofa": (1, 1), "coffeetable": (1, 1), "sidetable": (1, 2), "drawer": (1, 2), "shelf": (0, 1), "desk": (0, 1),
            "garbagecan": (0, 1), "armchair": (0, 1),
        },
        "bedroom": {
            "bed": (1, 1), "desk": (1, 1), "drawer": (1, 2), "shelf": (0, 1), "sidetable": (1, 1), "dresser": (0, 1),
            "garbagecan": (0, 1),
        },
        "bathroom": {
            "sinkbasin": (1, 1), "toilet": (1, 1), "cabinet": (1, 2), "countertop": (1, 1), "bathtubbasin": (0, 1),
            "garbagecan": (1, 1), "drawer": (0, 2),
        },
    },
}  # fmt: skip
_SHARED: Mapping[Size, float] = {"full": 0.15, "small": 0.0}  # how often a receptacle shares the location of the one before it
DISTRACTORS: Mapping[Size, tuple[int, int]] = {"full": (10, 30), "small": (3, 7)}

_KITCHEN = (
    "apple bread egg lettuce potato tomato bowl cup mug plate glassbottle winebottle butterknife fork knife ladle spatula spoon "
    "pan pot kettle peppershaker saltshaker dishsponge soapbottle papertowel vase statue book creditcard cellphone pencil"
)
_LIVING_ROOM = (
    "book box cellphone creditcard keychain laptop newspaper pillow remotecontrol vase statue watch tissuebox pen pencil "
    "candle wateringcan plate bowl"
)
_BEDROOM = (
    "alarmclock baseballbat basketball book box cd cellphone cloth creditcard keychain laptop mug bowl pen pencil pillow "
    "tennisracket tissuebox watch"
)
_BATHROOM = (
    "candle cloth dishsponge handtowel papertowel plunger soapbar soapbottle spraybottle tissuebox toiletpaper "
    "toiletpaperroll towel"
)
THINGS: Mapping[str, tuple[str, ...]] = {  # room -> object types that lie around in it
    "kitchen": tuple(_KITCHEN.split()),
    "livingroom": tuple(_LIVING_ROOM.split()),
    "bedroom": tuple(_BEDROOM.split()),
    "bathroom": tuple(_BATHROOM.split()),
}
LAMP_PLACES = frozenset({"desk", "dresser", "shelf", "sidetable"})


@dataclass(frozen=True)
class Room:
    """The receptacles of one scene number.

    Attributes:
        kind: kitchen, livingroom, bedroom or bathroom.
        scene: ALFRED's number.
        receptacles: (entity, type, location) of each.
    """

    kind: str
    scene: int
    receptacles: tuple[tuple[str, str, str], ...]


def room_of(kind: str, scene: int, seed: int, size: Size) -> Room:
    """The room with a scene number: the same for every game in it."""
    rng = Random(f"{seed}/room/{size}/{scene}")
    receptacles: list[tuple[str, str, str]] = []
    for name, (least, most) in _RECEPTACLES[size][kind].items():
        for number in range(1, rng.randint(least, most) + 1):
            shares = number > 1 and rng.random() < _SHARED[size]
            location = receptacles[-1][2] if shares else f"loc_bar_{len(receptacles) + 1}"
            receptacles.append((entity_of(name, number), name, location))
    return Room(kind, scene, tuple(receptacles))


def entity_of(kind: str, number: int) -> str:
    """An id as AlfWorld's demangler expects it: a sink's basin is named after the sink."""
    if kind.endswith("basin"):
        return f"{kind.removesuffix('basin')}_bar_{number:02d}_bar_{kind}"
    return f"{kind}_bar_{number:02d}"
