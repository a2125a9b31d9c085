"""What has to hold, S1 to S142, and public faults of others that must not happen here, B01 to B141, with the tests that stand for each.

Tests are found by their marks, `@pytest.mark.case("S24", "B05")`.

A mark may stand on a test, a class, one of its parameters, or as `pytestmark` on a whole file. A statement without a test is listed with
its reason in a page of `docs/decisions/`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT: Final = Path(__file__).parents[1]
TESTS: Final = ROOT / "tests"
DECISION: Final = ROOT / "docs/decisions/0012-statements-without-a-test.md"

STATEMENTS: Final = {
    # the header
    "S1": "The key is the raw field value, an opaque string; digits may come first.",
    "S2": "One pair of double quotes around it is taken off before it is checked, compared and stored.",
    "S3": "Broken forms are answered 400 before the key store is asked.",
    "S4": "A key has at most 255 bytes; that is published.",
    "S5": "Its alphabet is published and enforced before the store is asked.",
    "S6": "Several `Idempotency-Key` fields, or values joined by a comma, are answered 400; nothing is executed.",
    "S7": "A missing key, where one is required, is answered 400 with a page that explains it; where it is optional, nothing is stored.",
    "S8": "On GET, HEAD, OPTIONS and DELETE the header has no effect, and the documentation says so.",
    "S9": "The field's name is found in any case.",
    "S10": "The documentation recommends UUIDv4, forbids personal data in keys and says that they are stored.",
    "S11": "Our own calls send a key unquoted, in each provider's form and length.",
    "S12": "A release step shows that the header survives the ingress.",
    "S13": "Browsers may send the key and read the mark of a repeat and `Retry-After`.",
    # scope
    "S14": "(tenant, operation, key) is unique by a constraint of the database.",
    "S15": "Two tenants with one key and one body both execute.",
    "S16": "No key of one tenant ever gives another tenant a byte of an answer.",
    "S17": "One key may be used on two operations; both execute, and a metric shows it.",
    "S18": "The documentation says that keys are per operation, and why.",
    "S19": "An operation is method, route template and version; path and significant query are in the fingerprint.",
    "S20": "An unauthenticated request never reaches the layer.",
    "S21": "The scope is published beside each operation.",
    "S22": "What happens with several regions and after a failover is published.",
    # fingerprint
    "S23": "Each operation declares what is compared; without that the start is refused.",
    "S24": "The same key with other significant content is answered 422, and the stored row is unchanged.",
    "S25": "Another order of members, white space and other spellings of the same number are the same request.",
    "S26": "Amounts are decimal strings; a JSON number is refused.",
    "S27": "A change of any one significant member is a 422.",
    "S28": "Headers, trace ids, and members that are not declared change nothing.",
    "S29": "A new optional member changes no existing fingerprint.",
    "S30": "What is compared is declared beside the operation and published with it.",
    "S31": "Two keys with one body are two operations.",
    "S32": "A stored fingerprint has a version and is compared by it.",
    "S33": "No two requests share an encoding; doubled members, NaN and infinities are refused.",
    "S34": "422 comes before the stored response and before 409.",
    "S35": "The 422 tells nothing of what is stored.",
    # claiming, and requests at once
    "S36": "The key is claimed in a transaction of its own, committed before any effect.",
    "S37": "Of 50 identical requests at two processes one executes; the others get 409 or the stored response.",
    "S38": "The insert decides: no read before it, no lock in a process.",
    "S39": "Who comes second gets 409 with a `Retry-After` within the lease.",
    "S40": "It does not wait and holds no connection.",
    "S41": "The 409 is never stored.",
    "S42": "The 409 means: retry with the same key; a reference client does so to the end.",
    "S43": "A request that the schema refuses leaves nothing; corrected, it may use the same key.",
    "S44": "Each 409 and 422 has a type of its own.",
    "S45": "Without the key store nothing is executed: 503 with `Retry-After`.",
    "S46": "23505, 40001 and 40P01 while claiming are never a 500.",
    "S47": "A row that is pruned between insert and read is claimed again.",
    "S48": "Leases and expiries are database time.",
    # leases and recovery
    "S49": "The schema forbids a row in progress without a lease.",
    "S50": "After a killed owner repeats get 409 until the lease ends, and not for ever.",
    "S51": "A take-over needs the same fingerprint; another request leaves lease and fence alone.",
    "S52": "Of two take-overs at once one wins.",
    "S53": "A lease outlives the deadline of the work under it, or the start is refused; slow work is an alert.",
    "S54": "Each take-over is logged and counted.",
    "S55": "An owner that lost its lease writes nothing.",
    "S56": "A lease is renewed only under its fence.",
    "S57": "Each operation declares what happens beyond the database: local, idempotent or none.",
    "S58": "Local and idempotent operations are taken over and executed again safely.",
    "S59": "Class none, with an intent and no outcome, becomes indeterminate: 409 with a reconciliation id.",
    "S60": "Class none without an intent is taken over.",
    "S61": "An indeterminate row is never executed again by itself.",
    "S62": "Indeterminate rows are listed and counted, and a person settles them, with the evidence recorded.",
    "S63": "The documentation says what indeterminate means and what to do.",
    "S64": "The writes of a phase and its recovery point commit together.",
    "S65": "A repeat skips the phases that were committed.",
    "S66": "No transaction is open during a foreign call.",
    "S67": "Foreign calls get our key: the same after retries, restarts and the loss of the row.",
    "S68": "It changes only after a definite failure.",
    "S69": "The response is stored in the transaction that makes it true.",
    "S70": "Our retries end before the provider forgets our key; then a person decides.",
    "S71": "With several providers the shortest memory and the shortest key are computed.",
    "S72": "Each adapter reads its provider's own word for in progress; a status alone means nothing.",
    "S73": "What finishes abandoned rows by itself obeys lease, fence and class.",
    # stored responses
    "S74": "A repeat has the first answer's status, bytes and listed headers.",
    "S75": "It carries `Idempotent-Replayed: true`; a first answer does not.",
    "S76": "Only listed headers are stored.",
    "S77": "All others are made anew.",
    "S78": "Deliberate refusals are stored and repeated without executing.",
    "S79": "The documentation says that a changed request needs a new key.",
    "S80": "401, 403, 408, 429, 502, 503 and 504 are never stored.",
    "S81": "A 500 that an operation gives on purpose is stored.",
    "S82": "An unhandled exception or the death of a process is never stored.",
    "S83": "The largest stored body is published, and a larger one leaves nothing unrecorded.",
    "S84": "What streams its answer cannot take a key.",
    "S85": "A request body over the limit is 413 before the key is claimed.",
    "S86": "Of asynchronous work only its acceptance is stored; its state is read from the resource.",
    "S87": "Repeats have no effects and are counted apart.",
    "S88": "Authentication runs again on a repeat.",
    # where it stands
    "S89": "Authentication, then the rate limit, then the key, then the work.",
    "S90": "A client that goes away stops nothing; its repeat gets the answer.",
    "S91": "Nothing of ours repeats a POST by itself; the documentation warns of what does.",
    # retention
    "S92": "Answers about money are kept for seven days at least, others for a day; less stops the start.",
    "S93": "The number and its start are published beside each operation.",
    "S94": "Within retention a completed key answers; open rows are never pruned.",
    "S95": "After pruning the same key is a new request, and the documentation says so.",
    "S96": "What is repeated after pruning meets the permanent reference: a definite 409 that names it.",
    "S97": "That reference is in a table that is neither pruned nor partitioned.",
    "S98": "The documentation gives the rule for a client's horizon, with numbers.",
    "S99": "The pruner works in batches, stops no claim and says how late it is.",
    # errors of the database
    "S100": "23505 is classed by its constraint: a duplicate, a business answer or a bug.",
    "S101": "40001 and 40P01 run the whole transaction again, then 503.",
    "S102": "A connection lost at COMMIT is found out, never guessed.",
    "S103": "One lost before COMMIT is safe to repeat.",
    "S104": "After a failover a writable server is used, never a read-only one.",
    # notifications
    "S105": "No effect before the provider confirms; a 2xx acknowledges storage only.",
    "S106": "Ids, amount, currency, account and mode are checked against the order that the provider's answer names.",
    "S107": "Ledger, order, payment, own tables and events commit in one transaction.",
    "S108": "The unique constraint detects a duplicate, no read and no lock.",
    "S109": "A duplicate is answered 2xx and does nothing else.",
    "S110": "The ledger's key is the operation's identity, never a hash of the payload.",
    "S111": "Every notification is kept as it came, refused ones too; a flood of forgeries is sampled.",
    "S112": "Notifications may come again and in any order; the documentation says that nobody guarantees otherwise.",
    "S113": "A failure hides no later payment; only a higher rank is applied.",
    "S114": "The provider is asked outside any transaction and off the response path.",
    "S115": "2xx only after the commit; what cannot be stored is 503.",
    "S116": "Ledger rows are permanent.",
    # events
    "S117": "An event has one id, in every attempt and to every endpoint.",
    "S118": "The retry schedule is published and followed, `Retry-After` included.",
    "S119": "An event is written with its cause; a crash after that still delivers.",
    "S120": "The documentation says at least once, and how to deduplicate.",
    "S121": "An event's id is made from its cause, so it comes out the same after a loss of data.",
    "S122": "A dead or slow endpoint delays no other.",
    "S123": "A dispatcher that was killed is followed by another attempt, and overwrites nothing when it wakes.",
    "S124": "Work is found by its state; the pull has no gaps.",
    # documentation
    "S125": "The header is called a widely-used convention; conformance with a standard is claimed nowhere.",
    "S126": "References are to documents in force.",
    "S127": "Each operation publishes its five answers.",
    "S128": "It publishes 422 for another request and 409 for one in progress.",
    "S129": "It lists which statuses are stored and which never are.",
    "S130": "Every problem document shown is valid JSON.",
    "S131": "Callers are told to make a key first, to keep it, to reuse it, and when to make a new one.",
    "S132": "Outcomes, not delivery, are called exactly-once.",
    "S133": "These statements are tested against a real PostgreSQL with several processes.",
    "S134": "OpenAPI documents the header, the mark of a repeat and `Retry-After` of the 409.",
    "S135": "A secret that is shown once is never stored; a repeat leaves it out.",
    "S136": "Idempotent means the same intended effect, not the same bytes.",
    "S137": "Keys are logged as digests only; a stored body can be erased and its key kept.",
    "S138": "Alerts measure lateness by due time, and no data is an alert.",
    "S139": "A tenant's open keys are bounded, before they are claimed.",
    "S140": "A tenant can look at its own keys without executing anything.",
    "S141": "Nothing between the 2xx and the effect loses a notification.",
    "S142": "A read of the ledger may only save a question; it never decides that something is new.",
}


CASES: Final = {
    # one notification twice
    "B01": ("awesomemotive/easy-digital-downloads#6605", "Notification and browser return at the same instant pay once and are told once."),
    "B03": ("PAYONE-GmbH/magento-2#279", "Two posts of one payment at once, in other words each, add its money once."),
    "B05": ("academe/SagePay#38", "A repeat whose first answer was lost gets the same success, and changes nothing."),
    "B08": ("gitlab.torproject.org/tpo/web/donate-neo!179", "One payment told through two channels is one credit, or waits for a person."),
    # before the order, and beside the customer's return
    "B09": ("duncanmcclean/statamic-cargo#190", "A notification that is earlier than its order waits, and pays when the order appears."),
    "B11": ("conedevelopment/simplepay-gateway PR #103", "Whoever comes late with an old state changes no newer one."),
    # out of order
    "B14": ("kevupton/laravel-coinpayments#26", "An informative word is a success for its sender, and never undoes a payment."),
    "B16": ("PayU-EMEA/openpayu_php#27", "In whatever order an order's words arrive, it ends the same."),
    "B17": ("open-formulieren/open-forms#5942", "A payment after a failure under the same reference counts."),
    # money
    "B19": ("awesomemotive/easy-digital-downloads#2727", "A converted payment is compared in the currency of the order."),
    "B21": ("restrictcontentpro/restrict-content-pro#1433", "An amount is the same number everywhere, and grouped nowhere."),
    "B23": ("restrictcontentpro/restrict-content-pro#544", "Amounts are compared as numbers; what is finer than the currency is no match."),
    "B25": ("nopSolutions/nopCommerce#1780", "An order cannot be finer than its currency."),
    "B27": ("RubyMoney/money#831", "What is no plain number is malformed before anything is compared with it."),
    # bytes
    "B29": ("unacms.com/d/paypal-ipn-validation-fails-when-payer", "What is posted back for confirmation are the bytes that came."),
    "B31": ("pallets/werkzeug#909", "A declared charset is honoured, and undecodable text harms nothing that is signed."),
    "B33": ("paypal/ipn-code-samples PR #153", "Blank fields are part of what is signed, kept and posted back."),
    "B35": ("python/cpython#87133", "Only an ampersand separates fields."),
    "B37": ("nyaruka/goflow PR #1027", "A NUL in a notification is stored, shown marked, and no error."),
    "B39": ("tj/node-querystring#84", "A field that comes twice is malformed, never guessed."),
    # asking the provider
    "B41": ("akeeba/akeebasubs#281", "An answer that is no answer is no verdict: asked again, and paid in the end."),
    "B43": ("mollie/Magento PR #108", "A question that timed out is asked again by us; no second notification is needed."),
    "B46": (
        "strangerstudios/paid-memberships-pro#1787",
        "That the provider was asked before says nothing about whether the payment is applied.",
    ),
    "B47": ("paypal/ipn-code-samples#43", "A provider's certificate is checked, and nothing switches that off."),
    "B49": (
        "woocommerce/woocommerce-gateway-stripe#818",
        "A risky payment is booked and waits; a copy of its notification releases nothing.",
    ),
    "B52": ("ranasl62/npm-sslcommerz#2", "Wrong credentials alarm for their source, close no order, and what was refused can be replayed."),
    # the local proof
    "B53": ("sslcommerz/SSLCommerz-Python PR #1", "A genuine hash verifies; a key that names an absent field is a clean mismatch."),
    "B55": ("louislewis2/payfast#3", "Absent, blank and the text null are three different things under a hash."),
    "B57": (
        "Paytm-Payments/Paytm_Android_App_Kit#69",
        "A secret keeps every byte on each way in, and what was refused meanwhile can be replayed.",
    ),
    "B59": ("harishbisht/paytm-django#14", "A notification without its hash is refused and kept, and is no error of ours."),
    # forged, and meant for somebody else
    "B61": ("cubecart/v6#1670", "A genuine payment of another amount is held, however often it comes, and told once."),
    "B63": ("webtechnick/CakePHP-Paypal-IPN-Plugin#2", "Money that went to another merchant pays nothing here."),
    "B65": ("oc-shopaholic/oc-omnipay-shopaholic-plugin#24", "Opening the success page proves nothing."),
    "B67": ("efdevcon/pretix-eth-payment-plugin PR #37", "One payment pays one order."),
    # the listener as a web server
    "B69": ("sslcommerz/SSLCommerz-Laravel#58", "No cookie, token or origin is asked of a provider."),
    "B71": ("fastapi/fastapi#4990", "With and without the trailing slash it is the same listener, and nothing redirects."),
    "B73": ("planningcenter/developers#459", "A form without a content type, or with a general one, is read."),
    "B75": ("woocommerce/woocommerce-gateway-payfast#7", "The sender's address decides nothing."),
    "B77": ("getsentry/sentry-python PR #1724", "A body that something else has read is read all the same."),
    # the database
    "B79": ("django-getpaid/django-plans PR #231", "Parallel payments of one customer all count in the merchant's own tables."),
    "B81": ("dj-stripe/dj-stripe#1267", "Writers that meet in another order lose no effect; a deadlock is run again."),
    # sending
    "B83": ("hasura/graphql-engine#1778", "Many retries of one moment are spread out, and an endpoint gets no more than it takes."),
    "B85": ("documenso/documenso#3204", "Every attempt of an event has its id and its bytes."),
    "B87": ("spatie/laravel-webhook-server#47", "After 410, disabling or deletion nothing more is sent."),
    "B89": ("Mnexa-AI/e2a PR #62", "Two dispatchers send each row once, and take over what a killed one left."),
    "B91": ("owncast/owncast#1504", "An endpoint that hangs keeps no other waiting."),
    "B93": ("formancehq/ledger PR #1990", "A redirect is a failed attempt, and is not followed."),
    "B95": ("netalertx/NetAlertX#1720", "What is signed is what is sent, byte for byte."),
    "B98": ("svix/svix-webhooks PR #2393", "One fitting signature among several is enough, wherever it stands."),
    "B99": ("stripe/stripe-php#657", "A timestamp too far ahead is refused like one that is too old."),
    "B101": ("documenso/documenso PR #3166", "No spelling of a private address is accepted."),
    "B103": ("spupuz/VibeNVR PR #297", "One private address among those of a name refuses it."),
    "B105": ("encode/httpx#1450", "An answer that trickles ends at the total deadline."),
    "B107": ("Sanofi-IADC/whispr PR #206", "A receiver's bad certificate is a failed attempt, and nothing switches checking off."),
    # keys
    "B109": ("VilledeMontreal/express-idempotency#32", "A call that was killed blocks its key for its lease, and then runs once."),
    "B111": ("codatio/codat-docs PR #1842", "What never reached the operation does not use its key up."),
    "B113": ("arun0009/idempotent PR #217", "One tenant's keys mean nothing to another."),
    "B115": ("aws-powertools/powertools-lambda-python#638", "The same JSON in another spelling is the same request."),
    "B117": ("granit-fx/granit-dotnet PR #1151", "A repeat gets listed headers only, and too large an answer is not executed again."),
    "B119": (
        "alphagov/pay-connector PR #4414",
        "Keys outside the published alphabet and length are refused, and none is trimmed into another.",
    ),
    "B121": ("alphagov/pay-connector PR #4460", "Of many first calls at once one executes, and none fails."),
    "B123": ("ietf-wg-httpapi/idempotency#23", "On a read a key does nothing."),
    # keeping
    "B125": (
        "JSONbored/loopover PR #666",
        "After retention took the delivery, a copy has no second effect, whatever the provider says now.",
    ),
    "B127": ("superset-sh/superset PR #6517", "Bodies go with their month, and what they paid is still known."),
    "B129": ("Znote/ZnoteAAC#507", "Evidence is kept whatever its length, also where the effect rolled back."),
    # time
    "B131": (
        "spookylukey/django-paypal#92",
        "A time with the name of a zone is read in it; an unknown zone gives way to the time of receipt.",
    ),
    # late, partial, double, back
    "B133": ("mollie/WooCommerce#1204", "A second payment of a paid order is booked apart, told, and can be refunded."),
    "B135": ("coreshop/CoreShop#2529", "Money for a cancelled order is booked and waits for a person."),
    "B137": ("wpsharks/s2member#40", "Partial refunds add up, each once; more than was paid is held."),
    "B139": ("Payum/Payum#609", "A dispute and its end are told, and leave the order paid."),
    "B141": ("buckaroo-it/Magento2 PR #1492", "A part of the amount pays no order; parts that a person applies add up."),
}
"""Faults seen in public: where, and what must hold here instead."""


def by_statement(folder: Path = TESTS) -> dict[str, list[str]]:
    """The tests of each statement: file and name, or the file alone where all of it stands for one."""
    return _by_mark("S", folder)


def by_case(folder: Path = TESTS) -> dict[str, list[str]]:
    """The tests of each case, in the same way."""
    return _by_mark("B", folder)


def _by_mark(letter: str, folder: Path) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder.parent).as_posix()
        for test, marks in _marked(ast.parse(path.read_text(encoding="utf-8"))):
            for mark in marks:
                if mark.startswith(letter):
                    found.setdefault(mark, set()).add(f"`{name}` {test}".rstrip())
    return {mark: sorted(tests) for mark, tests in found.items()}


def _marked(module: ast.Module, prefix: str = "") -> Iterator[tuple[str, set[str]]]:
    for node in module.body:
        if isinstance(node, ast.Assign):  # `pytestmark`, or the cases of a parametrized test
            yield prefix, _numbers([node.value])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, _numbers(node.decorator_list) | _named(node.name)
        elif isinstance(node, ast.ClassDef):
            yield node.name, _numbers(node.decorator_list)
            yield from _marked(ast.Module(node.body, []), node.name)


def _numbers(nodes: Iterable[ast.AST]) -> set[str]:
    """What the marks below some nodes say."""
    calls = [
        call for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("mark.case")
    ]
    given = {value.value for call in calls for value in call.args if isinstance(value, ast.Constant)}
    return {value for value in given if isinstance(value, str)}


def _named(test: str) -> set[str]:
    return {f"S{number}" for number in re.findall(r"_s(\d{1,3})(?=_|$)", test)}


def excused() -> dict[str, str]:
    """The statements that are listed as having no test, with the reason."""
    if not DECISION.is_file():
        return {}
    return dict(re.findall(r"^\| (S\d+) \| (.*?) \|$", DECISION.read_text(encoding="utf-8"), re.MULTILINE))
