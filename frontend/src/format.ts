// Numbers as the page shows them. Every function keeps the same width for neighbouring values, so that nothing jumps.

const UNITS = ["", " K", " M", " B", " T", " P"];

/** 1234567 → "1.23 M": three significant digits from a thousand on. */
export function count(value: number): string {
  if (!Number.isFinite(value)) return "–";
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  if (unit === 0) return String(Math.round(value));
  return value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0) + UNITS[unit];
}

/** As `count`, without the zeros that only keep widths alike: for the marks of an axis. */
export function mark(value: number): string {
  const [number, unit] = count(value).split(" ");
  return unit ? `${Number(number)} ${unit}` : number!;
}

export function whole(value: number): string {
  return Math.round(value).toLocaleString("en-US");
}

export function loss(value: number | undefined): string {
  return value === undefined || !Number.isFinite(value) ? "–" : value.toFixed(3);
}

export function percent(share: number): string {
  const value = Math.max(0, Math.min(1, share)) * 100;
  return `${value === 0 || value === 100 ? value : value < 9.95 ? value.toFixed(1) : Math.floor(value)} %`;
}

/** Seconds of one step → "85 ms", "0.25 s", "5.4 s", "3.2 min", "1.5 h". */
export function seconds(value: number): string {
  if (!Number.isFinite(value)) return "–";
  if (value < 0.0995) return value > 0 && value < 0.0005 ? "<1 ms" : `${Math.round(value * 1000)} ms`;
  if (value < 99.95) return `${value.toFixed(value < 0.995 ? 2 : 1)} s`;
  return value < 5400 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
}

/** Bytes → "412 MiB", "3.0 GiB", "1.2 TiB". */
export function bytes(value: number): string {
  if (value >= 2 ** 40) return `${(value / 2 ** 40).toFixed(1)} TiB`;
  if (value >= 2 ** 30) return `${(value / 2 ** 30).toFixed(1)} GiB`;
  return value > 0 && value < 2 ** 20 ? "<1 MiB" : `${Math.round(value / 2 ** 20)} MiB`;
}

/** Bytes a second → "85 kB/s", "1.2 MB/s". */
export function speed(value: number): string {
  if (!Number.isFinite(value)) return "–";
  return value >= 999_500 ? `${(value / 1e6).toFixed(value < 9.95e6 ? 1 : 0)} MB/s` : `${Math.round(value / 1000)} kB/s`;
}

/** Bits a parameter → "8 bits", "4.0 bits", "0.23 bits". */
export function bits(value: number): string {
  return `${value < 0.995 ? value.toFixed(2) : value.toFixed(1)} bits`;
}

/** How far off, as a share of what was expected → "+6 %", "−12 %". */
export function deviation(share: number): string {
  const value = Math.round(share * 100);
  if (Math.abs(value) > 999) return value > 0 ? ">999 %" : "<−999 %";
  return `${value > 0 ? "+" : value < 0 ? "−" : "±"}${Math.abs(value)} %`;
}

/** Seconds → "now", "40 s", "3 min", "5 h", "12 d". */
export function ago(seconds: number): string {
  if (seconds < 3) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 90 * 60) return `${Math.round(seconds / 60)} min`;
  if (seconds < 36 * 3600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

/** Seconds → "1 h 05 min": two units at most. */
export function duration(seconds: number): string {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 90 * 60) return `${Math.round(seconds / 60)} min`;
  if (seconds < 48 * 3600) {
    const minutes = Math.round(seconds / 60);
    return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  }
  return `${Math.round(seconds / 86_400)} days`;
}

const DAY = 86_400;

/** Seconds since 1970 → "14:05" of the last day, "3 Jun 14:05" before; in the reader's own time zone or a named one. */
export function moment(at: number, now: number, timeZone?: string): string {
  const zone = timeZone ? { timeZone } : {};
  const time = new Date(at * 1000);
  const hours = time.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...zone });
  if (now - at < DAY) return hours;
  return `${time.toLocaleDateString("en-GB", { day: "numeric", month: "short", ...zone })} ${hours}`;
}
