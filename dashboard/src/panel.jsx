// SPDX-License-Identifier: GPL-3.0-or-later
// One panel of a dashboard, drawn with Grafana's own components.
import {
  FieldConfigOptionsRegistry, applyFieldOverrides, createTheme, getDisplayValueAlignmentFactors, getFieldDisplayValues,
  identityOverrideProcessor, standardTransformers, standardTransformersRegistry, thresholdsOverrideProcessor, transformDataFrame,
  valueMappingsOverrideProcessor,
} from '@grafana/data';
import { BigValue, PanelChrome, Table, TimeSeries, VizRepeater } from '@grafana/ui';
import React, { useEffect, useMemo, useState } from 'react';
import { firstValueFrom } from 'rxjs';
import { interpolate, query } from './prometheus.js';

export const theme = createTheme({ colors: { mode: 'dark' } });

standardTransformersRegistry.setInit(() =>
  ['joinByFieldTransformer', 'organizeFieldsTransformer'].map((name) => {
    const transformation = standardTransformers[name];
    return { id: transformation.id, name: transformation.name, transformation: () => transformation };
  }));

// Grafana's list of field options is part of its server's front end; the libraries need names and processors only.
const STANDARD = ['unit', 'min', 'max', 'decimals', 'displayName', 'color', 'noValue', 'thresholds', 'mappings'];
const PROCESSORS = { thresholds: thresholdsOverrideProcessor, mappings: valueMappingsOverrideProcessor };

function option(id, isCustom = false) {
  return {
    id: isCustom ? `custom.${id}` : id,
    path: id,
    name: id,
    isCustom,
    settings: {},
    editor: () => null,
    override: () => null,
    process: PROCESSORS[id] ?? identityOverrideProcessor,
    shouldApply: () => true,
  };
}

function registryOf({ defaults, overrides }) {
  const inOverrides = overrides.flatMap(({ properties }) => properties.map(({ id }) => id));
  const custom = new Set([
    ...Object.keys(defaults.custom ?? {}),
    ...inOverrides.filter((id) => id.startsWith('custom.')).map((id) => id.slice('custom.'.length)),
  ]);
  return new FieldConfigOptionsRegistry(() => [
    ...STANDARD.map((id) => option(id)), ...[...custom].map((id) => option(id, true)),
  ]);
}

// JSON has no infinity; Grafana puts it back into the lowest threshold when it loads a dashboard.
const lowest = (text, value) => (text === 'steps' ? value.map((step) => ({ ...step, value: step.value ?? -Infinity })) : value);

function prepare(panel, frames, values) {
  const fieldConfig = JSON.parse(JSON.stringify(panel.fieldConfig), lowest);
  fieldConfig.defaults.color ??= { mode: 'thresholds' };
  return applyFieldOverrides({
    data: frames,
    fieldConfig,
    fieldConfigRegistry: registryOf(fieldConfig),
    replaceVariables: (text) => interpolate(text, values),
    theme,
    timeZone: 'utc',
  });
}

function timeRange({ from, to }) {
  const at = (ms) => ({ valueOf: () => ms });
  return { from: at(from), to: at(to), raw: { from: 'now', to: 'now' } };
}

function Stat({ panel, data, width, height }) {
  const { reduceOptions, orientation, colorMode, graphMode, textMode } = panel.options;
  const getValues = () => getFieldDisplayValues({
    fieldConfig: panel.fieldConfig, reduceOptions, replaceVariables: (text) => text, theme, data, timeZone: 'utc',
  });
  const renderValue = ({ value, width, height, alignmentFactors }) => (
    <BigValue
      value={value.display} theme={theme} width={width} height={height} alignmentFactors={alignmentFactors}
      colorMode={colorMode} graphMode={graphMode} textMode={textMode}
    />
  );
  return (
    <VizRepeater
      source={data} getValues={getValues} getAlignmentFactors={getDisplayValueAlignmentFactors} renderValue={renderValue}
      renderCounter={0} autoGrid
      orientation={orientation} width={width} height={height}
    />
  );
}

function Visualization({ panel, data, range, width, height }) {
  const { legend } = panel.options ?? {};
  switch (panel.type) {
    case 'timeseries':
      return (
        <TimeSeries frames={data} width={width} height={height} timeRange={timeRange(range)} timeZone="utc" legend={legend} />
      );
    case 'stat':
      return <Stat panel={panel} data={data} width={width} height={height} />;
    case 'table':
      return <Table data={data[0]} width={width} height={height} />;
    default:
      throw new Error(`this page cannot draw panels of type ${panel.type}`);
  }
}

function useFrames(panel, range, variables) {
  const [state, setState] = useState({ frames: null, error: '' });
  useEffect(() => {
    let current = true;
    const context = { interpolate: (text) => interpolate(text, variables.values) };
    query(panel, range, variables)
      .then((frames) => firstValueFrom(transformDataFrame(panel.transformations ?? [], frames, context)))
      .then((frames) => current && setState({ frames: frames.filter((frame) => frame.length), error: '' }))
      .catch((error) => current && setState({ frames: [], error: error.message }));
    return () => { current = false; };
  }, [panel, range, variables]);
  return state;
}

/** width, height: pixels. data-state is loading, ok, nodata or error; shot.mjs reads it. */
export function Panel({ panel, range, variables, width, height }) {
  const { frames, error } = useFrames(panel, range, variables);
  const data = useMemo(() => frames && prepare(panel, frames, variables.values), [panel, frames, variables]);
  const series = frames?.length ?? -1;
  const state = error ? 'error' : series < 0 ? 'loading' : series ? 'ok' : 'nodata';
  const noValue = panel.fieldConfig.defaults.noValue ?? 'No data';
  return (
    <div
      className="panel" data-id={panel.id} data-title={panel.title} data-type={panel.type}
      data-state={state} data-series={series} data-error={error} data-novalue={noValue}
    >
      <PanelChrome title={panel.title} description={panel.description} width={width} height={height} statusMessage={error || undefined}>
        {(innerWidth, innerHeight) => {
          if (!data || error) return null;
          if (!data.length) return <p style={{ textAlign: 'center', color: theme.colors.text.secondary }}>{noValue}</p>;
          return <Visualization panel={panel} data={data} range={range} width={innerWidth} height={innerHeight} />;
        }}
      </PanelChrome>
    </div>
  );
}
