"""ALFRED's facts: what fits where, what can be done to what, and the sentences that name a goal.

Shridhar et al. 2020 (arXiv 1912.01734). Sliced objects keep their type here, as in AlfWorld's games.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rla_lightning.environments.alfred.scene import APPLIANCES, KNIVES, Ability, Goal, Scene
from rla_lightning.environments.alfred.world import World, is_won

_GROUPS = {"table": "coffeetable countertop diningtable sidetable", "seat": "armchair ottoman sofa"}
_PLACES: Mapping[str, str] = {  # object -> receptacle types that it can be put into; `table` and `seat` are groups
    "AlarmClock": "table desk dresser shelf",
    "Apple": "table fridge garbagecan microwave sinkbasin",
    "BaseballBat": "table bed",
    "BasketBall": "table seat bed desk dresser",
    "Book": "table seat bed cabinet desk drawer dresser shelf",
    "Bowl": "table cabinet desk dresser fridge microwave shelf sinkbasin",
    "Box": "table seat cabinet desk dresser shelf",
    "Bread": "table fridge garbagecan microwave",
    "ButterKnife": "table drawer sinkbasin",
    "CD": "table cabinet desk drawer dresser garbagecan safe shelf",
    "Candle": "table cabinet cart desk drawer dresser shelf toilet",
    "CellPhone": "table seat bed desk drawer dresser safe shelf",
    "Cloth": "table seat bathtubbasin cabinet cart desk drawer dresser garbagecan laundryhamper shelf sinkbasin toilet",
    "CreditCard": "table seat desk drawer dresser safe shelf",
    "Cup": "table cabinet desk dresser fridge microwave shelf sinkbasin",
    "DishSponge": "table bathtubbasin cabinet cart drawer garbagecan shelf sinkbasin toilet",
    "Egg": "table fridge garbagecan microwave sinkbasin",
    "Fork": "table drawer sinkbasin",
    "Glassbottle": "table cabinet desk dresser fridge microwave shelf sinkbasin",
    "HandTowel": "table bathtubbasin cabinet cart drawer garbagecan handtowelholder shelf sinkbasin toilet",
    "Kettle": "table cabinet shelf sinkbasin stoveburner",
    "KeyChain": "table seat desk drawer dresser safe shelf",
    "Knife": "table drawer sinkbasin",
    "Ladle": "table cabinet drawer sinkbasin",
    "Laptop": "table seat bed desk dresser",
    "Lettuce": "table fridge garbagecan sinkbasin",
    "Mug": "table cabinet cart coffeemachine desk dresser fridge microwave shelf sinkbasin",
    "Newspaper": "table seat bed cabinet desk drawer dresser garbagecan shelf toilet",
    "Pan": "table cabinet fridge sinkbasin stoveburner",
    "PaperTowel": "table cart garbagecan shelf toilet",
    "Pen": "table desk drawer dresser garbagecan shelf",
    "Pencil": "table desk drawer dresser garbagecan shelf",
    "PepperShaker": "table cabinet drawer shelf",
    "Pillow": "seat bed",
    "Plate": "table cabinet desk dresser fridge microwave shelf sinkbasin",
    "Plunger": "cabinet cart",
    "Pot": "table cabinet fridge shelf sinkbasin stoveburner",
    "Potato": "table fridge garbagecan microwave sinkbasin",
    "RemoteControl": "table seat desk drawer dresser shelf",
    "SaltShaker": "table cabinet drawer shelf",
    "SoapBar": "table bathtubbasin cabinet cart drawer garbagecan shelf sinkbasin toilet",
    "SoapBottle": "table cabinet cart desk drawer garbagecan shelf toilet",
    "Spatula": "table drawer sinkbasin",
    "Spoon": "table drawer sinkbasin",
    "SprayBottle": "table cabinet cart desk drawer dresser garbagecan shelf toilet",
    "Statue": "table cart desk dresser safe shelf",
    "TennisRacket": "table bed desk dresser",
    "TissueBox": "table cabinet cart desk drawer dresser garbagecan shelf toilet tvstand",
    "ToiletPaper": "table cabinet cart desk drawer dresser garbagecan shelf toilet toiletpaperhanger",
    "ToiletPaperRoll": "table cabinet cart desk drawer dresser garbagecan shelf toilet toiletpaperhanger",
    "Tomato": "table fridge garbagecan microwave sinkbasin",
    "Towel": "towelholder",
    "Vase": "table cabinet cart desk dresser safe shelf",
    "Watch": "table desk drawer dresser safe shelf",
    "WateringCan": "table cabinet desk drawer dresser shelf",
    "WineBottle": "table cabinet desk dresser fridge garbagecan shelf",
}
RECEPTACLE_NAMES: tuple[str, ...] = (  # as ALFRED spells them
    "ArmChair", "BathtubBasin", "Bed", "Cabinet", "Cart", "CoffeeMachine", "CoffeeTable", "CounterTop", "Desk", "DiningTable",
    "Drawer", "Dresser", "Fridge", "GarbageCan", "HandTowelHolder", "LaundryHamper", "Microwave", "Ottoman", "Safe", "Shelf",
    "SideTable", "SinkBasin", "Sofa", "StoveBurner", "TVStand", "Toaster", "Toilet", "ToiletPaperHanger", "TowelHolder",
)  # fmt: skip
LAMP_NAMES = ("DeskLamp", "FloorLamp")

SPELLING: Mapping[str, str] = {name.lower(): name for name in (*RECEPTACLE_NAMES, *_PLACES, *LAMP_NAMES)}  # type -> ALFRED's name
OBJECT_TYPES: tuple[str, ...] = tuple(sorted(name.lower() for name in _PLACES))  # those that can be picked up
RECEPTACLE_TYPES: tuple[str, ...] = tuple(sorted(name.lower() for name in RECEPTACLE_NAMES))
LAMP_TYPES: tuple[str, ...] = tuple(name.lower() for name in LAMP_NAMES)
OPENABLE_TYPES = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})
MOVABLE_RECEPTACLES = frozenset({"bowl", "box", "cup", "mug", "pan", "plate", "pot"})  # objects that things can be put into


def _fits() -> dict[str, frozenset[str]]:
    fitting: dict[str, set[str]] = {kind: set() for kind in RECEPTACLE_TYPES}
    for name, places in _PLACES.items():
        for place in " ".join(_GROUPS.get(word, word) for word in places.split()).split():
            fitting[place].add(name.lower())
    return {kind: frozenset(names) for kind, names in fitting.items()}


FITS: Mapping[str, frozenset[str]] = _fits()  # receptacle type -> object types

_CROCKERY = frozenset({"cup", "mug", "plate"})
_FOOD = frozenset({"apple", "bread", "egg", "lettuce", "potato", "tomato"})
ABILITIES: Mapping[Ability, frozenset[str]] = {
    "heat": (_FOOD - {"lettuce"}) | _CROCKERY,
    "cool": _FOOD | _CROCKERY | {"bowl", "pan", "pot", "winebottle"},
    "clean": (_FOOD - {"bread"}) | _CROCKERY | {"bowl", "butterknife", "cloth", "dishsponge", "fork", "kettle", "knife", "ladle"}
    | {"pan", "pot", "soapbar", "spatula", "spoon"},
    "slice": _FOOD,
    "toggle": frozenset(LAMP_TYPES),
}  # fmt: skip

ROOMS: Mapping[str, frozenset[str]] = {  # goal kind -> rooms in which ALFRED has it
    "pick_and_place_simple": frozenset({"kitchen", "livingroom", "bedroom", "bathroom"}),
    "pick_two_obj_and_place": frozenset({"kitchen", "livingroom", "bedroom", "bathroom"}),
    "look_at_obj_in_light": frozenset({"livingroom", "bedroom"}),
    "pick_clean_then_place_in_recep": frozenset({"kitchen", "bathroom"}),
    "pick_heat_then_place_in_recep": frozenset({"kitchen"}),
    "pick_cool_then_place_in_recep": frozenset({"kitchen"}),
}

_SENTENCES: Mapping[str, tuple[str, str]] = {  # AlfWorld's, which agents trained elsewhere know
    "put": ("put a {o} in {t}", "put some {o} on {t}"),
    "clean": ("put a clean {o} in {t}", "clean some {o} and put it in {t}"),
    "heat": ("put a hot {o} in {t}", "heat some {o} and put it in {t}"),
    "cool": ("put a cool {o} in {t}", "cool some {o} and put it in {t}"),
    "two": ("put two {o} in {t}", "find two {o} and put them in {t}"),
    "light": ("look at {o} under the {t}", "examine the {o} with the {t}"),
}
_SLICED_SENTENCES: Mapping[str, tuple[str, str]] = {
    "put": ("slice {o} and put in {t}", "put sliced {o} in {t}"),
    "clean": ("put a clean slice of {o} in {t}", "clean some sliced {o} and put it in {t}"),
    "heat": ("put a hot slice of {o} in {t}", "heat some sliced {o} and put it in {t}"),
    "cool": ("put a cool slice of {o} in {t}", "cool some sliced {o} and put it in {t}"),
    "two": ("put two sliced {o} in {t}", "find two sliced {o} and put them in {t}"),
    "light": ("look at sliced {o} under the {t}", "examine the sliced {o} with the {t}"),
}


def instructions(goal: Goal) -> tuple[str, ...]:
    """The sentences that tell the agent the goal, without the full stop."""
    sentences = (_SLICED_SENTENCES if goal.sliced else _SENTENCES)[goal.word]
    return tuple(sentence.format(o=goal.object, t=goal.target) for sentence in sentences)


def abilities_of(object_type: str) -> frozenset[Ability]:
    able: set[Ability] = {"pickup"} if object_type in OBJECT_TYPES else set()
    return frozenset(able | {ability for ability, kinds in ABILITIES.items() if object_type in kinds})


def goal_problem(goal: Goal, scene: Scene, start: World) -> str | None:
    """Which constraint forbids the goal in a scene, or None; whether a plan exists is another question."""
    problem = next(_object_problems(goal, scene), None) or next(_target_problems(goal, scene, start), None)
    return "The goal holds at the start." if problem is None and is_won(goal, start) else problem


def _object_problems(goal: Goal, scene: Scene) -> Iterator[str]:
    own = [name for name in scene.of_type(goal.object) if name in scene.objects and "pickup" in scene.objects[name].can]
    if not own:
        yield f"The room has no {goal.object} that can be picked up."
    if len(own) < goal.count:
        yield f"The goal needs {goal.count} of {goal.object}, the room has {len(own)}."
    if goal.process and not any(goal.word in scene.objects[name].can for name in own):
        yield f"The {goal.object} is nothing to {goal.word}."
    if goal.sliced and not any("slice" in scene.objects[name].can for name in own):
        yield f"The {goal.object} is nothing to slice."


def _target_problems(goal: Goal, scene: Scene, start: World) -> Iterator[str]:
    named = scene.of_type(goal.target)
    if goal.word == "light":
        if not any(name in start.places and "toggle" in scene.objects[name].can for name in named if name in scene.objects):
            yield f"The room has no {goal.target} that can be switched."
    elif not any(name in scene.receptacles for name in named):
        yield f"The room has no {goal.target} to put things in."
    elif goal.object not in scene.fits.get(goal.target, ()):
        yield f"The {goal.object} does not fit the {goal.target}."
    appliances = {APPLIANCES.get(receptacle.type) for receptacle in scene.receptacles.values()}
    if goal.process and goal.word not in appliances:
        yield f"The room has nothing to {goal.word} with."
    if goal.sliced and not any(scene.of_type(kind) for kind in KNIVES):
        yield "The room has no knife."
