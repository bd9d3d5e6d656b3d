// Numbers as pages show them. Bytes, counts, durations, losses and shares are written as in
// templates and terminals (worker/barnraise/formats.py). Pure.

const UNITS = ["", " K", " M", " B", " T", " P"];
const UNKNOWN = "–";

const MINUTE = 60; // seconds
const HOUR = 3600;
const DAY = 86_400;

/** Format a count: 1234567 → "1.23 M", three significant digits from a thousand on. */
export function formatCount(value: number): string {
  if (!Number.isFinite(value)) return UNKNOWN;
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  if (unit === 0) return String(Math.round(value));
  return value.toFixed(countDecimals(value)) + UNITS[unit];
}

/** Return the decimals that give a value below 1000 three significant digits. */
function countDecimals(value: number): number {
  if (value < 9.995) return 2;
  return value < 99.95 ? 1 : 0;
}

/** Format a count for an axis: as `formatCount`, without trailing zeros. */
export function formatAxisCount(value: number): string {
  const [number, unit] = formatCount(value).split(" ");
  return unit ? `${Number(number)} ${unit}` : number!;
}

// Creating a format costs far more than using it, and `toLocaleString` creates one at each call.
const INTEGERS = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Format a whole number with commas: 1234567 → "1,234,567". */
export function formatInteger(value: number): string {
  return INTEGERS.format(Math.round(value));
}

/** Format a loss with three decimals. */
export function formatLoss(value: number | null | undefined): string {
  return value == null || !Number.isFinite(value) ? UNKNOWN : value.toFixed(3);
}

/** Format a share of 1 as a percentage; it is "100 %" only when the share is complete. */
export function formatPercent(share: number): string {
  const percent = Math.max(0, Math.min(1, share)) * 100;
  if (percent === 0 || percent === 100) return `${percent} %`;
  return percent < 9.95 ? `${percent.toFixed(1)} %` : `${Math.floor(percent)} %`;
}

/** Format the seconds of one step: "85 ms", "0.25 s", "5.4 s", "3.2 min", "1.5 h". */
export function formatStepTime(seconds: number): string {
  if (!Number.isFinite(seconds)) return UNKNOWN;
  if (seconds > 0 && seconds < 0.0005) return "<1 ms";
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 0.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 99.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 1.5 * HOUR) return `${(seconds / MINUTE).toFixed(1)} min`;
  return `${(seconds / HOUR).toFixed(1)} h`;
}

/** Format a number of bytes in decimal units: "3 kB", "1.5 MB", "24 GB", "1.2 TB". */
export function formatBytes(bytes: number): string {
  if (!Number.isFinite(bytes)) return UNKNOWN;
  if (bytes < 999_500) return `${INTEGERS.format(bytes / 1e3)} kB`;
  if (bytes < 999.95e6) return `${trimNumber(bytes / 1e6)} MB`;
  if (bytes < 999.95e9) return `${trimNumber(bytes / 1e9)} GB`;
  return `${trimNumber(bytes / 1e12)} TB`;
}

/** Format bytes per second: "85 kB/s", "1.2 MB/s". */
export function formatByteRate(bytesPerSecond: number): string {
  const size = formatBytes(bytesPerSecond);
  return size === UNKNOWN ? UNKNOWN : `${size}/s`;
}

/** Format bits per parameter: "8.0 bits", "0.23 bits". */
export function formatBits(bits: number): string {
  return `${bits.toFixed(bits < 0.995 ? 2 : 1)} bits`;
}

/** Format how long ago something was: "now", "40 s", "3 min", "5 h", "12 d". */
export function formatAge(seconds: number): string {
  if (seconds < 3) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 90 * MINUTE) return `${Math.round(seconds / MINUTE)} min`;
  if (seconds < 36 * HOUR) return `${Math.round(seconds / HOUR)} h`;
  return `${Math.round(seconds / DAY)} d`;
}

/** Format a duration in at most two units: "40 s", "10 min", "1 h 05 min", "12 days". */
export function formatDuration(seconds: number): string {
  if (!Number.isFinite(seconds)) return UNKNOWN;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 90 * MINUTE) return `${Math.round(seconds / MINUTE)} min`;
  if (seconds < 48 * HOUR) {
    const minutes = Math.round(seconds / MINUTE);
    return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  }
  return `${Math.round(seconds / DAY)} days`;
}

/**
 * Format a moment: "14:05" on the same day, "3 Jun 14:05" on others.
 *
 * @param time - seconds since 1970
 * @param now - seconds since 1970
 * @param timeZone - the browser's time zone if absent
 */
export function formatMoment(time: number, now: number, timeZone?: string): string {
  const clock = dateFormat("clock", timeZone).format(time * 1000);
  const days = dateFormat("day", timeZone);
  const day = days.format(time * 1000);
  return Math.abs(now - time) < DAY && day === days.format(now * 1000) ? clock : `${day} ${clock}`;
}

/** Format the day of a moment in seconds since 1970: "3 Jun". */
export function formatDay(time: number): string {
  return dateFormat("day").format(time * 1000);
}

/** Format the time of day of a moment in seconds since 1970: "14:05:09". */
export function formatClock(time: number): string {
  return dateFormat("second").format(time * 1000);
}

const DATE_PARTS = {
  clock: { hour: "2-digit", minute: "2-digit" },
  second: { hour: "2-digit", minute: "2-digit", second: "2-digit" },
  day: { day: "numeric", month: "short" },
} as const;
const dateFormats = new Map<string, Intl.DateTimeFormat>();

/** Return a format of dates; creating one costs far more than using it. */
function dateFormat(parts: keyof typeof DATE_PARTS, timeZone?: string): Intl.DateTimeFormat {
  const key = `${parts} ${timeZone ?? ""}`;
  let format = dateFormats.get(key);
  if (!format) {
    const zone = timeZone ? { timeZone } : {};
    format = new Intl.DateTimeFormat("en-GB", { ...DATE_PARTS[parts], ...zone });
    dateFormats.set(key, format);
  }
  return format;
}

/** Format a duration for an axis: "40 s", "10 min", "5 h", "3 d". */
export function formatAxisDuration(seconds: number): string {
  if (seconds < 2 * MINUTE) return `${trimNumber(seconds)} s`;
  if (seconds < 2 * HOUR) return `${trimNumber(seconds / MINUTE)} min`;
  if (seconds < 2 * DAY) return `${trimNumber(seconds / HOUR)} h`;
  return `${trimNumber(seconds / DAY)} d`;
}

function trimNumber(value: number): string {
  return String(Number(value.toFixed(1)));
}

/** Format a value of any size with three significant digits: 0.0006 → "6.00e-4", 0.75 → "0.750". */
export function formatValue(value: number | undefined): string {
  if (value === undefined || !Number.isFinite(value)) return UNKNOWN;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 0.001) return value.toExponential(2);
  return size < 1000 ? value.toPrecision(3) : formatCount(value);
}

/** Format a mark of an axis: no zeros at its end, and digits enough for marks that lie close. */
export function formatAxisValue(value: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 0.001) return value.toExponential(1).replace(".0e", "e");
  return size < 1000 ? String(Number(value.toPrecision(5))) : formatAxisCount(value);
}
