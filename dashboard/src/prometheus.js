// SPDX-License-Identifier: GPL-3.0-or-later
// What Grafana's Prometheus data source does, as far as these panels need it: variables, queries, frames.
import { FieldType, toDataFrame } from '@grafana/data';

const POINTS = 200;

/** Values of $name and ${name}: from the address (?var-role=decode), or all. range: {from, to} in ms. */
export function variables(dashboard, address, range) {
  const seconds = Math.round((range.to - range.from) / 1000);
  const step = Math.max(1, Math.round(seconds / POINTS));
  const values = {
    // Four scrapes and a step, as Grafana has it; a rate needs two samples.
    __rate_interval: `${Math.max(60, 4 * step)}s`,
    __interval: `${step}s`,
    __range: `${seconds}s`,
  };
  for (const variable of dashboard.templating.list) {
    const chosen = address.getAll(`var-${variable.name}`);
    values[variable.name] = chosen.length ? chosen.join('|') : variable.allValue || '.+';
  }
  return { values, step };
}

/** A text with its variables filled in; the longest name first, so that $job does not eat $job_name. */
export function interpolate(text, values) {
  return text.replace(/\$(?:\{(\w+)\}|(\w+))/g, (whole, braced, bare) => values[braced ?? bare] ?? whole);
}

async function ask(path, parameters) {
  const answer = await fetch(`/api/v1/${path}?${new URLSearchParams(parameters)}`);
  const body = await answer.json().catch(() => ({ error: `HTTP ${answer.status}` }));
  if (body.status !== 'success') throw new Error(`${body.error}: ${parameters.query}`);
  return body.data.result;
}

// As text a NaN comes from a ratio without traffic, and is no value.
const number = (text) => (Number.isNaN(Number(text)) ? null : Number(text));

function legend(format, labels) {
  if (format) return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '');
  return Object.entries(labels).map(([name, text]) => `${name}="${text}"`).join(', ') || 'value';
}

function seriesFrame(target, { metric, values, value }) {
  const points = values ?? [value];
  const name = legend(target.legendFormat, metric);
  return toDataFrame({
    refId: target.refId,
    name,
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: points.map(([at]) => at * 1000) },
      {
        name: 'Value',
        type: FieldType.number,
        labels: metric,
        config: { displayNameFromDS: name },
        values: points.map(([, text]) => number(text)),
      },
    ],
  });
}

function tableFrame(target, series, valueName) {
  const labels = [...new Set(series.flatMap(({ metric }) => Object.keys(metric)))].sort();
  const column = (name) => ({
    name, type: FieldType.string, config: {}, values: series.map(({ metric }) => metric[name] ?? ''),
  });
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: series.map(({ value: [at] }) => at * 1000) },
      ...labels.map(column),
      { name: valueName, type: FieldType.number, config: {}, values: series.map(({ value: [, text] }) => number(text)) },
    ],
  });
}

/** The frames of one panel; throws with Prometheus's own words. */
export async function query(panel, range, { values, step }) {
  const several = panel.targets.length > 1;
  const frames = await Promise.all(panel.targets.map(async (target) => {
    const expr = interpolate(target.expr, values);
    const series = target.instant
      ? await ask('query', { query: expr, time: range.to / 1000 })
      : await ask('query_range', { query: expr, start: range.from / 1000, end: range.to / 1000, step });
    if (target.format !== 'table') return series.map((one) => seriesFrame(target, one));
    return series.length ? [tableFrame(target, series, several ? `Value #${target.refId}` : 'Value')] : [];
  }));
  return frames.flat();
}
