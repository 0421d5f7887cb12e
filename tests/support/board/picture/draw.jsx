// Draws a board of Grafana with Grafana's own components, for a picture without its server.
import React from 'react';
import { createRoot } from 'react-dom/client';
import {
  toDataFrame, applyFieldOverrides, createTheme, getFieldDisplayValues, getDisplayProcessor, standardFieldConfigEditorRegistry,
  FieldConfigOptionsRegistry, FieldColorModeId, getTimeField, dateTime, FieldType, ThemeContext,
} from '@grafana/data-cjs';
import { TimeSeries, BigValue, BarGauge, Table, PanelChrome } from '@grafana/ui-cjs';

const BOARD = window.BOARD, DATA = window.DATA, THEME = createTheme({ colors: { mode: 'dark' } });
const RANGE = { from: dateTime(DATA.from), to: dateTime(DATA.to), raw: { from: 'now-15m', to: 'now' } };

const named = (legend, labels) => (legend || '').replace(/{{(\w+)}}/g, (_, one) => labels[one] ?? '');
function frames(panel) {
  const made = [];
  (panel.targets || []).forEach((target, index) => {
    const found = DATA.panels[panel.id][index];
    if (panel.type === 'table') {
      const labels = [...new Set(found.flatMap((one) => Object.keys(one.metric)))].sort();
      made.push({ labels, rows: found, name: `Value #${target.refId}` });
      return;
    }
    for (const one of found) {
      const points = one.values || [one.value];
      made.push(toDataFrame({
        refId: target.refId, name: named(target.legendFormat, one.metric),
        fields: [
          { name: 'Time', type: FieldType.time, values: points.map(([at]) => at * 1000), config: {} },
          { name: 'Value', type: FieldType.number, labels: one.metric, values: points.map(([, value]) => Number(value)),
            config: { displayNameFromDS: named(target.legendFormat, one.metric) } },
        ],
      }));
    }
  });
  return made;
}
function styled(panel, data) {
  const { defaults, overrides } = panel.fieldConfig;
  const color = panel.type === 'timeseries' ? { mode: 'palette-classic' } : { mode: 'thresholds' };
  const config = { defaults: { color, ...defaults }, overrides };
  const ready = applyFieldOverrides({ data, fieldConfig: config, replaceVariables: (text) => text, theme: THEME, timeZone: 'utc',
    fieldConfigRegistry: new FieldConfigOptionsRegistry() });
  for (const frame of ready) for (const field of frame.fields) {
    field.config = { ...defaults, color, ...field.config, custom: { ...(defaults.custom || {}) } };
    field.display = getDisplayProcessor({ field, theme: THEME, timeZone: 'utc' });
  }
  return ready;
}
function asTable(panel) {
  const parts = frames(panel), organize = panel.transformations[1].options;
  const keys = [...new Set(parts.flatMap((one) => one.labels))].filter((one) => !organize.excludeByName[one]);
  const rows = new Map();
  parts.forEach((part) => part.rows.forEach((one) => {
    const key = keys.map((label) => one.metric[label] ?? '').join('\0');
    rows.set(key, { ...rows.get(key), ...one.metric, [part.name]: Number(one.value[1]) });
  }));
  const listed = [...rows.values()];
  const fields = keys.map((key) => ({ name: key, type: FieldType.string, values: listed.map((one) => one[key] ?? ''), config: { custom: {} } }));
  for (const part of parts) {
    const name = organize.renameByName[parts.length === 1 ? 'Value' : part.name];
    if (!name) continue;
    const unit = panel.fieldConfig.overrides.find((one) => one.matcher.options === name)?.properties[0].value;
    fields.push({ name, type: FieldType.number, values: listed.map((one) => one[part.name]), config: { unit, custom: {} } });
  }
  const frame = toDataFrame({ fields });
  for (const field of frame.fields) field.display = getDisplayProcessor({ field, theme: THEME, timeZone: 'utc' });
  return frame;
}
function Lanes({ panel, width }) {
  const words = panel.fieldConfig.defaults.mappings[0].options, from = DATA.from, span = DATA.to - DATA.from, left = 90;
  const series = frames(panel), height = 26;
  const x = (at) => left + (width - left) * (at - from) / span;
  return <svg width={width} height={series.length * height + 4}>{series.map((frame, index) => {
    const times = frame.fields[0].values, values = frame.fields[1].values, step = times.length > 1 ? times[1] - times[0] : span;
    return <g key={index}><text x={0} y={index * height + 17} fontSize={12} fill="#ccccdc">{frame.name}</text>{times.map((at, i) =>
      <rect key={i} x={x(at)} y={index * height + 3} width={Math.max(1, x(at + step) - x(at)) + 0.5} height={20}
        fill={THEME.visualization.getColorByName(words[values[i]]?.color ?? 'gray')} opacity={0.8} />)}</g>;
  })}</svg>;
}
function Inside({ panel, width, height }) {
  if (panel.type === 'table') {
    const frame = asTable(panel);
    if (!frame.length) return <div style={{ padding: 8, color: '#777' }}>{panel.fieldConfig.defaults.noValue}</div>;
    return <Table data={frame} width={width} height={height} />;
  }
  if (panel.type === 'state-timeline') return <Lanes panel={panel} width={width} />;
  const data = styled(panel, frames(panel));
  if (panel.type === 'timeseries')
    return data.length ? <TimeSeries frames={data} structureRev={1} timeRange={RANGE} timeZone="utc" width={width} height={height}
      legend={panel.options.legend} options={panel.options} /> : <div style={{ padding: 8, color: '#777' }}>No data</div>;
  const shown = data.flatMap((frame) => frame.fields.filter((one) => one.type === FieldType.number).map((field) => {
    const value = field.display(field.values[field.values.length - 1]);
    return { ...value, title: frame.name, field };
  }));
  if (panel.type === 'stat') {
    if (!shown.length) return <BigValue value={{ text: panel.fieldConfig.defaults.noValue, numeric: NaN }} width={width} height={height} theme={THEME} colorMode="value" graphMode="none" justifyMode="auto" />;
    return <div style={{ display: 'flex' }}>{shown.map((one, i) => <BigValue key={i} value={one} width={width / shown.length} height={height}
      theme={THEME} colorMode="value" graphMode="none" justifyMode="auto" textMode={panel.options.textMode} />)}</div>;
  }
  return <div>{shown.map((one, i) => <BarGauge key={i} value={one} field={one.field.config} display={one.field.display} width={width} height={Math.min(40, height / shown.length)}
    theme={THEME} orientation="horizontal" displayMode="basic" showUnfilled />)}</div>;
}
const COLUMN = 58, ROW = 36;
function Board() {
  const bottom = Math.max(...BOARD.panels.map(({ gridPos: at }) => (at.y + at.h) * ROW));
  return <ThemeContext.Provider value={THEME}><div style={{ position: 'relative', width: 24 * COLUMN, height: bottom, fontFamily: 'Liberation Sans' }}>
    {BOARD.panels.map((panel) => {
      const { x, y, w, h } = panel.gridPos;
      const style = { position: 'absolute', left: x * COLUMN + 3, top: y * ROW + 3, width: w * COLUMN - 6, height: h * ROW - 6 };
      if (panel.type === 'row') return <h2 key={panel.id} style={{ ...style, fontSize: 16, margin: 0, paddingTop: 6 }}>{panel.title}</h2>;
      return <div key={panel.id} style={style}><PanelChrome title={panel.title} width={style.width} height={style.height}>
        {(width, height) => <Inside panel={panel} width={width} height={height} />}</PanelChrome></div>;
    })}</div></ThemeContext.Provider>;
}
createRoot(document.getElementById('root')).render(<Board />);
