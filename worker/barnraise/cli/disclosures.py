"""Describe every field that this machine sends, for `barnraise privacy`. Pure.

A test finds the fields in the classes of the messages, and fails until each is described here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Disclosure:
    """What is sent on one occasion."""

    occasion: str  # when, or for whom
    fields: dict[str, str]  # a description → "Message: field field; Message: …"


TO_SITE = (
    Disclosure(
        "With every request",
        {
            "the address of your network, as every web server sees it": "",
            "the version of barnraise, and a signature by this machine's key": (
                "Signed: key body signature"
            ),
        },
    ),
    Disclosure(
        "When you enrol this machine (you and the site's staff see it; its name, everybody)",
        {
            "its name: the host name, or what --name says": "MachineDescription: hostname",
            "its public key, the site's, and the time": "EnrolmentRequest: mirror key issued",
            "operating system, processor, cores, memory and graphics card": (
                "EnrolmentRequest: machine; MachineDescription: system processor cores "
                "memory_bytes accelerator"
            ),
        },
    ),
    Disclosure(
        "When you join a run",
        {
            "the secret part of an invitation's link": "InvitationToken: token",
            "version, and whether you train, train in a crew or only download": (
                "JoinRequest: version purpose"
            ),
            "the addresses at which peers reach this machine (the run's machines see them)": (
                "JoinRequest: addresses; Report: addresses"
            ),
            "how fast and large the machine is, as it measured itself": (
                "JoinRequest: hardware; HardwareView: device name cores memory device_memory disk "
                "dtype matmul attention elementwise to_device from_device stream adam disk_read "
                "disk_write products attention_contexts attention_heads attention_backward logits "
                "updates processor; ProductsView: dtype forward backward; "
                "UpdatesView: where dtype bits rate"
            ),
        },
    ),
    Disclosure(
        "Every few seconds while you train, for everybody who may see the run",
        {
            "what it does: activity, steps, tokens, speed, losses, learning rate, gradient norm": (
                "Reports: reports; Report: version activity step abandoned_steps tokens "
                "ledger_tokens rate step_seconds learning_rate gradient_norm points seq at; "
                "MeasuredLoss: kind tokens loss"
            ),
            "why it pauses, by one word, and until when": (
                "Report: pause; PauseView: reason until"
            ),
            "its plan: device, memory, disk and layers that training uses": (
                "Report: plan; PlanView: device device_bytes host_bytes disk_bytes groups "
                "micro_batches micro_tokens layers resident clipping crash_safety binding "
                "predicted_seconds disk_written_per_day sentence"
            ),
            "the crew that it leads: its machines, their blocks and shares": (
                "Report: crew; CrewSeatView: key first_block blocks share connected"
            ),
            "its exchange: bytes, rates, links by the starts of the peers' keys": (
                "Report: updates_sent updates_received peers peer_bytes_sent peer_bytes_received "
                "exchange links; ExchangeView: round_steps scheme density bits_per_parameter "
                "sent_rate received_rate uplink_rate lag relayed reached suspended; "
                "LinkView: peer sent_rate received_rate agrees relayed"
            ),
            "digests of its weights and updates, from which nobody can compute them": (
                "Report: incarnation vector anchor checkpoint; "
                "CheckpointView: tokens vector digest checksum size; Reports: verdicts_after "
                "session attestations; Attestation: head statement; "
                "SignedHeader: key body signature; SignedStatement: key body signature; "
                "AttestationStatement: run author head"
            ),
            "short samples that the model wrote after the run's prompts": (
                "Report: samples; SamplesView: tokens texts; Sample: prompt text"
            ),
        },
    ),
    Disclosure(
        "Every few seconds while you train, for you and the site's staff alone",
        {
            "how busy the machine is: processor, memory, graphics card, temperatures": (
                "Report: system; SystemView: cpu worker_cpu memory_used worker_memory memory_total "
                "gpu gpu_memory_used gpu_memory_total cpu_celsius gpu_celsius"
            ),
            "your limits and rules, with the names of programs that go first": (
                "Report: limits; LimitsView: memory device_memory disk disk_writes_per_day uplink "
                "hours idle on_battery busy_cpu pause_for threads cpu max_temperature month_up "
                "download"
            ),
            "why it pauses, in a sentence that may name such a program": "Report: pause_sentence",
            "the last lines of the worker's log, which may name folders but no password": (
                "Report: log; LogLine: at level text"
            ),
            "what `barnraise doctor` found, before the first join and when you run it": (
                "Checkup: version reach findings; CheckupFinding: subject level sentence"
            ),
        },
    ),
    Disclosure(
        "When you prepare the text of a run of yours",
        {
            "sizes and digests of the parts of the text, and how much was read": (
                "TextManifest: run vocabulary tokenizer train held_out start model counts; "
                "Shard: digest tokens; ModelShape: architecture layers width heads "
                "key_value_heads head_size hidden context vocabulary rope_theta norm_epsilon "
                "qk_norm tied_head; "
                "TextCounts: files left_out documents duplicates skipped_rows bytes characters"
            ),
            "the tokens of the run's prompts": "TextManifest: prompts",
        },
    ),
    Disclosure(
        "When you evaluate a run, or publish texts with a run of yours",
        {
            "how many of the run's own tasks its weights answered": (
                "TaskScore: tasks tokens correct count"
            ),
            "the tasks, and beginnings of up to ten documents, where you chose to publish them": (
                "PublishedTexts: tasks preview; TaskFile: text; PreviewDocument: text"
            ),
        },
    ),
)
TO_PEERS = (
    Disclosure(
        "Who you are: a key and a digest, and no name",
        {
            "the address of your network, as everybody sees who is connected": "",
            "version, run, public key, and the site's permission to take part": (
                "Hello: type protocols version run spec incarnation ticket session; "
                "Signed: key body signature; Ticket: run peer machine volunteer roles standing "
                "max_tokens_per_second issued expires mirror; "
                "WorkerSession: run peer session started issued; ChannelGreeting: key nonce; "
                "ChannelProof: certificate peer nonce; CopiedKeyNotice: type statement; "
                "Goodbye: type reason"
            ),
            "addresses: yours, the peer's own, and those of other peers": (
                "Hello: addresses observed; PeerList: type peers; Peer: key addresses; "
                "DialNow: run peer target addresses issued is_answer; "
                "DialNowRelay: type statement; DialBackRequest: type ports met; "
                "DialBackErrand: type number peer addresses; "
                "DialBackResult: type number outcome by_another"
            ),
        },
    ),
    Disclosure(
        "What you train",
        {
            "your updates: what a round has changed in the model, signed, with tokens and times": (
                "UpdatePush: type header ticket has_payloads; Update: run peer incarnation seq "
                "previous tokens total started_ms time_ms ticket volunteer newcomer fragments; "
                "FragmentUpdate: digest size sketch"
            ),
            "if you lead a crew: its machines' keys, with their shares of the tokens": (
                "Update: crew; CrewShare: key tokens"
            ),
            "which updates you have, how fast you train and send, and what you ask for": (
                "PeerState: type vector pruned declined full anchor_vector anchor_digest rate "
                "complete verdicts_digest heads_digest mirror_list_version uplink; "
                "UpdateRequest: type author first last headers"
            ),
            "weights and the run's text, to who asks for them": (
                "BlobRequest: type digest offset; BlobPart: type digest offset total; "
                "BlobMissing: type digest; SnapshotRequest: type vector confirmed; "
                "SnapshotManifest: type vector fragments heads tickets verdicts proofs"
            ),
        },
    ),
    Disclosure(
        "What keeps a run honest",
        {
            "whose updates you found useless or fit, and decisions of owners and sites": (
                "Opinions: run peer time_ms doubted agreeing attested; Doubt: since_ms kept; "
                "SignedOpinions: type opinions ticket; SignedVerdict: type body signatures; "
                "Verdict: run after updates keys volunteers cleared mirror_list_version reason "
                "issued; VerdictSummary: type prefix digests; VerdictNames: type prefix names "
                "is_answer; DirectiveRelay: type directive"
            ),
            "bytes without meaning, to measure a line": (
                "LineTestRequest: type size; LineTestPart: type is_last; "
                "LineTestReceipt: type size seconds"
            ),
        },
    ),
)
TO_OTHERS = (
    "your router: the request to forward a port (none with `barnraise limits --no-port-mapping`)",
    "a relay server that the site's operator has chosen, where two machines do not reach each "
    "other without it: who talks to whom and how much, never what",
    "Hugging Face, or the address of a text: requests for what a run of yours names, when this "
    "machine prepares its text",
)
TO_NOBODY = (
    "your files: barnraise reads its own folder, and the text that `barnraise prepare` is given",
    "what you type, see or visit, your contacts and your place",
    "this machine's private key, the passphrase of its backup, your site's password and tokens",
    "your name and email: the site has them from you, and peers see a digest",
    "statistics for the authors of barnraise: there are none",
)
