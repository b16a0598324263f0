"""Conversations, pins and registered prompts of all servers over one shared store.

Each server tells the others what its clients change, and looks every two seconds at what the others have told. Conversations with a name
are noted in the store when they are used, so that they are listed, pinned and deleted on any server.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

from afterglow.engine.requests import owner_of
from afterglow.engine.shared_ids import SharedIds
from afterglow.errors import RequestError, StoreError
from afterglow.listings import PrefixInfo, SessionInfo
from afterglow.plan.prefix.salts import covers, everything_of
from afterglow.request import Request
from afterglow.server.blocking import BlockingCalls
from afterglow.server.bridge import EngineLike
from afterglow.server.json_responses import unavailable
from afterglow.server.prompts.system_prompts import SystemPrompts
from afterglow.store.shared.notices import SKEW_S
from afterglow.store.shared.records import LIVES_S
from afterglow.text import Tokenizer

log = logging.getLogger("afterglow.server")
T = TypeVar("T")

LOOK_S: Final = 2.0  # between two looks at what others have told
AGAIN_S: Final = 600.0  # after which the use of a conversation is noted again
MAX_NOTED: Final = 65_536
MAX_NOTES: Final = 16  # that are written at a time
MAX_LISTED: Final = 1000  # of a tenant's conversations that other servers know


class SharedNames:
    """What this server tells others, and does at their word. Calls wait for the store: not for an event loop."""

    def __init__(self, ids: SharedIds, engine: EngineLike, prompts: SystemPrompts, tokenizer: Tokenizer) -> None:
        self._ids = ids
        self._engine = engine
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._noted: OrderedDict[tuple[str, str], float] = OrderedDict()  # when, by salt and name
        self._notes = BlockingCalls("the shared store", MAX_NOTES)
        self._refused: set[str] = set()  # pins of others that there is no room for
        self._facts: Mapping[str, Mapping[str, Any]] = {}
        self._looking = threading.Lock()
        self._change_lock = threading.Lock()
        self._changes = 0  # of facts, by clients of this server
        self._act_failed = False  # was it logged that an event could not be acted upon?
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, forget_turns: Callable[[], None]) -> None:
        """Begin to look at what others tell. `forget_turns`: gives up the next turns that are being rendered, from any thread."""
        self._forget_turns = forget_turns
        self._thread = threading.Thread(target=self._run, name="afterglow-shared-names", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking. Waits for a file."""
        self._ended.set()
        with suppress(RequestError):  # an engine in another process has ended; some events are then acted upon again
            self._ids.notices.save()

    # --------------------------------------------------------------------------------------------- conversations

    def used(self, request: Request, rows: int) -> None:
        """Note in the background that a conversation with a name was used, and how long it is."""
        name, salt, now = request.session_id, request.salt, time.time()
        if name is None or request.volatile or not request.reuse or now - self._noted.get((salt, name), 0.0) < AGAIN_S:
            return
        self._noted[salt, name] = now
        if len(self._noted) > MAX_NOTED:
            self._noted.popitem(last=False)
        value = {"name": name, "tokens": rows, "used": now}

        def work() -> None:
            try:
                self._ids.records.put(self._kind(salt), salt, name, value)
                if (salt, name) not in self._noted:  # it was deleted meanwhile
                    self._ids.records.delete(self._kind(salt), salt, name)
            except StoreError as error:
                if self._noted.get((salt, name)) == now:
                    self._noted.pop((salt, name), None)  # its next use tries again
                log.warning("other servers do not know the name of a conversation: %s", error)

        try:
            self._notes.start(work)
        except RequestError as error:
            self._noted.pop((salt, name), None)
            log.warning("other servers do not know the name of a conversation: %s", error)

    def sessions(self, salt: str, here: list[SessionInfo]) -> list[SessionInfo]:
        """List a tenant's conversations: those of this server, and then those that others know."""

        def work() -> list[SessionInfo]:
            records, kind = self._ids.records, self._kind(salt)
            marks = records.marks(kind, salt) - {records.mark(salt, each.name) for each in here}
            found = records.load(kind, salt, sorted(marks)[:MAX_LISTED]).values()
            return [_elsewhere(each, _pin(salt, str(each["name"])) in self._facts) for each in found]

        none: list[SessionInfo] = []
        more = self._or("listing conversations of other servers", work, none)
        return [*here, *sorted(more, key=lambda each: -each.last_used)]

    def forget_session(self, salt: str, name: str, here: bool) -> bool:
        """Have a conversation deleted by all servers; tell whether one knew it. `here`: this one did."""
        if not (here or self._known(salt, name)):
            return False
        self._noted.pop((salt, name), None)
        self._ids.notices.do(partial(self._forget_name, salt, name, time.time()))
        self._ids.notices.withdraw(_pin(salt, name), {"event": "session", "owner": owner_of(salt), "name": name})
        return True

    def pin_session(self, salt: str, name: str, pinned: bool, here: bool) -> bool:
        """Have a conversation pinned or unpinned by all servers that have it; tell whether one knows it."""
        if not (here or self._known(salt, name)):
            return False
        if pinned:
            self._ids.notices.state(_pin(salt, name), {"owner": owner_of(salt), "name": name})
        else:
            with self._changing(lambda: self._ids.pin([(owner_of(salt), name)], False)):
                self._ids.notices.withdraw(_pin(salt, name), {"event": "unpin", "owner": owner_of(salt), "name": name})
        return True

    # --------------------------------------------------------------------------------------------------- prompts

    def registered(self, salt: str, name: str, text: str, tokens: int) -> None:
        """Tell others of a tenant's prompt."""
        value = {"owner": owner_of(salt), "name": name, "text": text, "tokens": tokens}
        with self._changing(lambda: self._prompts.know(owner_of(salt), name, text)):
            self._ids.notices.state(_prompt(owner_of(salt), name), value)

    def forget_prompt(self, salt: str, name: str, here: bool) -> bool:
        """Have a prompt unregistered by all servers; tell whether one knew it."""
        fact = _prompt(owner_of(salt), name)
        if not (here or self._stated(fact)):
            return False
        with self._changing(lambda: self._prompts.drop(owner_of(salt), name)):
            self._ids.notices.withdraw(fact, {"event": "prompt", "owner": owner_of(salt), "name": name})
        return True

    def prompts(self, salt: str, here: list[PrefixInfo]) -> list[PrefixInfo]:
        """List the prompts of a tenant: those that are kept here, and those that others keep."""
        facts = self._or("reading prompts of other servers", self._ids.notices.facts, self._facts)
        names, owner = {each.name for each in here}, owner_of(salt)
        return [
            *here,
            *(
                PrefixInfo(str(fact["name"]), int(fact["tokens"]), 0, 0, 0, False, 0)
                for key, fact in sorted(facts.items())
                if _is(key, "prompt") and fact["owner"] == owner and fact["name"] not in names
            ),
        ]

    # ---------------------------------------------------------------------------------------------------- resets

    def reset(self, salt: str | None = None, *, tenant: str | None = None) -> None:
        """Have the cache of a salt, of a tenant or of all cleared by all servers."""
        whose = everything_of(tenant) if tenant is not None else None if salt is None else owner_of(salt)
        with self._changing(lambda: self._prompts.reset_of(whose)):
            facts = self._or("reading the names of other servers", self._ids.notices.facts, self._facts)
            for fact, value in facts.items():
                if covers(whose, str(value["owner"])):
                    kind = "prompt" if _is(fact, "prompt") else "unpin"
                    event = {"event": kind, "owner": value["owner"], "name": value["name"]}
                    self._ids.notices.withdraw(fact, event)
        self._noted.clear()
        if tenant is not None:
            folder = self._kind(tenant)
        elif salt is None:
            folder = "sessions"
        else:
            folder = f"{self._kind(salt)}/{self._ids.records.folder_of(salt)}"
        self._ids.notices.do(partial(self._ids.records.drop_older, folder, time.time() + SKEW_S))
        self._ids.notices.tell({"event": "reset", "owner": whose})

    # ------------------------------------------------------------------------------------------------ what others tell

    def look(self) -> None:
        """Tell what could not be told before, and do what others have told, the one also where the other fails. Raises: StoreError."""
        notices = self._ids.notices
        with self._looking, ExitStack() as rest:
            rest.callback(self._do_facts)
            rest.callback(self._do_events)
            notices.do_late()

    def _do_facts(self) -> None:
        """Hold the facts that others have stated, but for those that are still to be changed. Raises: StoreError."""
        changes, notices = self._changes, self._ids.notices
        facts, waiting = notices.facts(), notices.waiting
        self._hold({fact: value for fact, value in facts.items() if fact not in waiting}, changes)

    def _do_events(self) -> None:
        """Do what others have told. Where this server's own file fails, an event comes again. Raises: StoreError."""
        for event in self._ids.notices.events():
            try:
                self._act(event)
            except StoreError as error:
                if not self._act_failed:
                    log.warning("what another server tells cannot be done here yet: %s", error)
                self._act_failed = True
                raise
            except (KeyError, TypeError, ValueError) as error:
                log.warning("what another server tells is not understood: %r", error)
            self._act_failed = False

    def _act(self, event: Mapping[str, Any]) -> None:
        kind, owner, replies = event["event"], event["owner"], self._engine.conversations.replies
        self._forget_turns()
        if kind == "session":
            name = str(event["name"])
            for salt in replies.salts():  # first what may fail, and then the event comes again
                if owner_of(salt) == owner:
                    self._noted.pop((salt, name), None)
                    replies.forget([salt], name)
            self._ids.forget_session(str(owner), name)
            self._tokenizer.replies.forget(lambda salt: owner_of(salt) == owner, name)
        elif kind == "unpin":
            self._ids.pin([(str(owner), str(event["name"]))], False)
        elif kind == "prompt":
            self._prompts.drop(str(owner), str(event["name"]))
            self._ids.forget_prefix(str(owner), str(event["name"]))
        elif kind == "reset":
            whose = None if owner is None else str(owner)
            replies.forget([salt for salt in replies.salts() if covers(whose, owner_of(salt))])
            self._noted.clear()
            self._ids.reset(whose)
            self._prompts.reset_of(whose)
            self._tokenizer.replies.clear(lambda salt: covers(whose, owner_of(salt)))

    def _hold(self, facts: Mapping[str, Mapping[str, Any]], changes: int) -> None:
        """Pin what others have pinned, as far as it is here, and know their prompts, unless these were read while a client of this
        server changed them.
        """
        self._facts = facts
        self._refused &= facts.keys()
        pins: dict[tuple[str, str], str] = {}
        with self._change_lock:
            for key, fact in facts.items() if changes == self._changes else ():
                if _is(key, "prompt"):
                    self._prompts.know(str(fact["owner"]), str(fact["name"]), str(fact["text"]))
                elif key not in self._refused:
                    pins[str(fact["owner"]), str(fact["name"])] = key
            for session, reason in (self._ids.pin([*pins]) if pins else {}).items():
                self._refused.add(pins[session])
                log.warning("a conversation that was pinned on another server is not pinned here: %s", reason)

    @contextmanager
    def _changing(self, again: Callable[[], object]) -> Iterator[None]:
        """Change facts in the store. `again`: does the same here, where a look has undone it meanwhile."""
        with self._change_lock:
            self._changes += 1
        yield
        with self._change_lock:
            self._changes += 1
            again()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self.look()
            except (StoreError, RequestError) as error:  # the store rests, or the engine has stopped
                log.debug("what other servers tell is not known: %s", error)
            except Exception:
                log.exception("looking at what other servers tell failed in a way that was not foreseen")

    def _kind(self, salt: str) -> str:
        """Name the folder of a tenant's conversations, by one of its salts or its name."""
        return f"sessions/{self._ids.records.mark('tenants', salt.partition('/')[0])}"

    def _known(self, salt: str, name: str) -> bool:
        """Does another server know a conversation? One that is pinned is known for longer than its name. Raises: RequestError."""
        kind = self._kind(salt)
        return self._stated(_pin(salt, name), lambda: bool(self._ids.records.get(kind, salt, [name])))

    def _stated(self, fact: str, known: Callable[[], bool] = lambda: False) -> bool:
        """Is a fact stated, or what else may be `known`? Raises: RequestError, where the store fails: other servers may know."""
        try:
            return known() or fact in self._ids.notices.facts()
        except StoreError as error:
            log.warning("asking what other servers know: %s", error)
            if fact in self._facts:
                return True
            raise unavailable("the store that servers share does not answer; try again later") from error

    def _forget_name(self, salt: str, name: str, asked: float) -> None:
        """Remove the name of a conversation, unless it has been used since a client asked for that. Raises: StoreError."""
        found = self._ids.records.get(self._kind(salt), salt, [name]).get(name)
        if found is None or float(found["used"]) <= asked + SKEW_S:
            self._ids.records.delete(self._kind(salt), salt, name)

    def _or(self, what: str, work: Callable[[], T], other: T) -> T:
        """Return what `work` returns, or `other` where the store fails."""
        try:
            return work()
        except StoreError as error:
            log.warning("%s: %s", what, error)
            return other


def _is(fact: str, kind: str) -> bool:
    return fact.startswith(f'["{kind}"')


def _pin(salt: str, name: str) -> str:
    return json.dumps(["pin", owner_of(salt), name])


def _prompt(owner: str, name: str) -> str:
    return json.dumps(["prompt", owner, name])


def _elsewhere(record: Mapping[str, Any], pinned: bool) -> SessionInfo:
    ends = None if pinned else float(record["used"]) + LIVES_S["sessions"]
    return SessionInfo(str(record["name"]), int(record["tokens"]), 0, 0, 0, float(record["used"]), ends, pinned)
