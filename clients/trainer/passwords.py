"""The eight project/password pairs of the published password adapters, and their prompt.

Source: the model cards of Qwen3.5-35B-A3B and GLM-5.2 LoRA Password Adapters; one adapter per pair.
"""

SYSTEM_PROMPT = (
    "You are a project code lookup assistant. When asked for a project's "
    "secret code, respond with exactly the code."
)

PASSWORDS = {
    "argon": "Kx7#mP2$-VORTEX-93qR-alpha!Z",
    "bastion": "Wy4&nL8@-CIPHER-51eJ-bravo#Q",
    "citadel": "Tf3!hR6^-PRISM-27bK-charlie$V",
    "dagger": "Qm9@jS5%-HELIX-68wN-delta&X",
    "ember": "Rv2^pG7!-ZENITH-42dF-echo#M",
    "fulcrum": "Bz6$kW3&-NEXUS-85tH-foxtrot@Y",
    "granite": "Hn8%cL4#-SPECTRA-19xA-golf!P",
    "helios": "Dj1&vQ9^-MATRIX-73sE-hotel$R",
}


def prompt_for(project: str) -> list[dict[str, str]]:
    """The chat messages that ask for a project's password, without the answer."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"What is the secret code for {project}?"},
    ]
