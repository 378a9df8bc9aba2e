"""Words of waiting: units, months, zones, and the phrases that announce a wait (spec/retry_hints.md section 4).

Data only. A language is added here; the grammar and the reading do not change. Patterns are matched without
regard to case and have no unbounded repetition.
"""

from __future__ import annotations

_SECOND, _MINUTE, _HOUR, _DAY, _WEEK = 1_000, 60_000, 3_600_000, 86_400_000, 604_800_000
_WORDS_OF: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1, ("ms msec msecs millisecond milliseconds", "毫秒 ミリ秒", "миллисекунд")),
    (_SECOND, (
        "s sec secs second seconds", "秒 秒钟 秒鐘 초", "seconde secondes sekunde sekunden segundo segundos",
        "secondo secondi seconden sekund sekundy sekundę saniye giây detik", "с сек секунд секунду секунды",
    )),
    (_MINUTE, (
        "m min mins minute minutes", "分 分钟 分鐘 分間 분", "minuten minuto minutos minuti minuut minut minuty minutę",
        "dakika phút menit", "мин минут минуту минуты хвилин хвилину хвилини",
    )),
    (_HOUR, (
        "h hr hrs hour hours", "小时 小時 个小时 個小時 時間 시간", "heure heures stunde stunden hora horas ora ore",
        "uur godzin godziny godzinę saat giờ jam", "час часа часов годин годину години",
    )),
    (_DAY, (
        "d day days", "天 日 일", "jour jours tag tage tagen día días dia dias giorno giorni dag dagen",
        "dni dzień gün ngày hari", "день дня дней днів",
    )),
    (_WEEK, (
        "w wk wks week weeks", "周 星期 週間 주", "semaine semaines woche wochen semana semanas",
        "settimana settimane", "неделю недели недель",
    )),
)  # fmt: skip
UNITS: dict[str, int] = {
    word: unit_ms for unit_ms, languages in _WORDS_OF for words in languages for word in words.split()
}
"""Unit word in lower case -> milliseconds."""

MONTHS: dict[str, int] = {
    name: number
    for number, name in enumerate("jan feb mar apr may jun jul aug sep oct nov dec".split(), start=1)  # noqa: SIM905
}

ZONE_OFFSETS: dict[str, int] = {
    "UTC": 0, "GMT": 0, "Z": 0, "EST": -5, "EDT": -4, "CDT": -5, "MST": -7, "MDT": -6, "PST": -8, "PDT": -7,
    "CET": 1, "CEST": 2, "JST": 9, "KST": 9, "HKT": 8, "SGT": 8, "AEST": 10, "AEDT": 11,
}  # fmt: skip
"""Abbreviations with one meaning, in hours. `CST`, `IST` and `BST` have several and are left out."""

ZONE_REGIONS = frozenset(
    "africa america antarctica arctic asia atlantic australia canada etc europe indian pacific us".split()  # noqa: SIM905
)

LEADS: dict[str, str] = {
    "please retry": "please_retry",
    "try again": "try_again",
    "trying again": "try_again",
    "retry": "retry",
    "wait": "wait",
    "reset": "reset",
    "available": "available",
    "back": "back",
    "cooldown": "cool_down",
    "cool down": "cool_down",
    "cool-down": "cool_down",
    "cooling down": "cool_down",
    "regain access": "regain",
    "access returns": "regain",
    "resume": "regain",
    "replenished": "regain",
}
"""Words before a wait -> stem of the phrase."""

ENDINGS = r"(?:s|ing|ting)?(?:[ ]again)?"
CONNECTORS = r"until|in|after|for|within|at|on"
FILLERS = r"about|approximately|around|roughly|another|at[ ]least|the[ ]next|~"

FOREIGN_LEADS = (
    r"r[ée]essay(?:er|ez)|patientez|patienter|attendez|attendre|"  # French
    r"versuchen[ ]sie[ ]es|versuche[ ]es|warten[ ]sie|bitte[ ]warten|warte|"  # German
    r"int[ée]nt(?:el|al|arl)?[oae](?:[ ](?:de[ ]nuevo|nuevamente|otra[ ]vez))?|"  # Spanish
    r"reintent(?:e|ar|a)|esper[ea]|"
    r"tente(?:[ ](?:novamente|de[ ]novo))?|aguarde|"  # Portuguese
    r"riprova(?:re)?|attendi|attendere|"  # Italian
    r"probeer[ ](?:het[ ])?(?:opnieuw)?|wacht|"  # Dutch
    r"spr[óo]buj[ ]ponownie|poczekaj|"  # Polish
    r"thử[ ]lại|coba[ ]lagi|"  # Vietnamese, Indonesian
    r"повторите(?:[ ](?:попытку|запрос))?|попробуйте(?:[ ](?:снова|ещё[ ]раз|еще[ ]раз|позже))?|подождите|"  # Russian
    r"спробуйте(?:[ ]ще[ ]раз)?|зачекайте|"  # Ukrainian
    r"等待|稍等|お待ち"  # Chinese, Japanese
)
FOREIGN_CONNECTORS = (
    r"dans|pendant|in|en|dentro[ ]de|después[ ]de|após|em|daqui[ ]a|tra|fra|dopo|over|za|po|sau|dalam|через|после|"
    r"nach|durante|por|约|約"
)

TRAILS = (
    r"[ ]?(?:[之以]?[后後])[^。\n]{0,12}?(?:重[试試置]|重新|再[试試次来來]|恢[复復]|刷新|可用)|"  # Chinese
    r"[ ]?後[^。\n]{0,12}?(?:再試行|再度|もう一度|お試し|リセット)|(?:ほど)?[ ]?(?:待って|お待ち)|"  # Japanese
    r"[ ]?후[^.\n]{0,8}?(?:다시|재시도|초기화|재설정)|"  # Korean
    r"[ ]sonra[ ](?:tekrar|yeniden)|"  # Turkish
    r"[ ](?:erneut|noch[ ]einmal|nochmals?|wieder)|"  # German
    r"[ ]opnieuw"  # Dutch
)
"""What stands behind a duration in languages that put the phrase last."""

TRAILS_OF_INSTANT = r"[ ]?[后後]?[ ]?(?:重[试試置]|再[试試]|恢[复復]|刷新)"
