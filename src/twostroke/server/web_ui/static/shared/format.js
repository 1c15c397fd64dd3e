// Numbers as people read them: few digits, and always a unit.

const THIN = "\u202f"; // between a number and its unit

/** Return a duration: 84 ms, 1.42 s, 3 min 20 s. */
export function duration(seconds) {
  if (!isKnown(seconds)) return "–";
  if (seconds < 0.00095) return `${Math.round(seconds * 1e6)}${THIN}µs`;
  if (seconds < 0.00995) return `${(seconds * 1000).toFixed(1)}${THIN}ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)}${THIN}ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)}${THIN}s`;
  if (seconds < 99.95) return `${seconds.toFixed(1)}${THIN}s`;
  return long(Math.round(seconds));
}

function long(seconds) {
  if (seconds < 3600) return `${Math.floor(seconds / 60)}${THIN}min ${seconds % 60}${THIN}s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 2880) return `${Math.floor(minutes / 60)}${THIN}h ${minutes % 60}${THIN}min`;
  return `${Math.floor(minutes / 1440)}${THIN}days`;
}

/** Return a whole number with its thousands apart. */
export function count(number) {
  return isKnown(number) ? Math.round(number).toLocaleString("en-GB").replaceAll(",", THIN) : "–";
}

/** Return a rate without its unit, with three digits or so. */
export function rate(number) {
  if (!isKnown(number)) return "–";
  if (number === 0) return "0";
  if (number < 1) return number.toFixed(2);
  if (number < 100) return number.toFixed(1);
  return count(number);
}

/** Return a share as a percentage. */
export function percent(share) {
  if (!isKnown(share)) return "–";
  const hundredths = share * 100;
  const isFine = hundredths > 0 && hundredths < 9.95;
  return `${isFine ? hundredths.toFixed(1) : Math.round(hundredths)}${THIN}%`;
}

const PREFIXES = ["", "k", "M", "G", "T", "P"];

/** Return a quantity with a prefix and its unit: 34.1 GB/s. */
export function quantity(number, unit) {
  if (!isKnown(number)) return "–";
  let power = 0;
  let value = number;
  while (Math.abs(value) >= 999.5 && power < PREFIXES.length - 1) {
    value /= 1000;
    power += 1;
  }
  const digits = Math.abs(value) >= 99.95 || Number.isInteger(value) ? 0 : Math.abs(value) >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)}${THIN}${PREFIXES[power]}${unit}`;
}

/** Return an amount of money: USD 12.30, and more digits of small amounts. */
export function money(amount, currency) {
  if (!isKnown(amount)) return "–";
  const digits = amount === 0 || amount >= 0.995 ? 2 : amount >= 0.00995 ? 3 : 6;
  return `${currency}${THIN}${grouped(amount.toFixed(digits))}`;
}

/** Return an amount of money without its currency, with two digits. */
export function amountOf(money) {
  if (!isKnown(money)) return "–";
  return money > 0 && money < 0.005 ? "< 0.01" : grouped(money.toFixed(2));
}

function grouped(text) {
  const [whole, ...fraction] = text.split(".");
  return [count(Number(whole)), ...fraction].join(".");
}

/** Return "1 token" or "2 tokens". */
export function counted(number, noun) {
  return `${count(number)}${THIN}${noun}${Math.round(number) === 1 ? "" : "s"}`;
}

export function isKnown(number) {
  return typeof number === "number" && Number.isFinite(number);
}
