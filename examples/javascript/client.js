// Asks a recinfer server for scores and embeddings from its proto alone: nothing of recinfer is needed but that file.
//
//   cd examples/javascript && npm install
//   node client.js 127.0.0.1:8500 '{"user": [[3, 9], [1]], "item": [[5], []]}' '[[0.5, 1.0], [0.0, 0.25]]'
//
// The second argument is each feature's ids, one list a sample; the third, of `predict`, the rows of dense numbers.
// Without the third the call is a lookup. It prints one JSON object.
"use strict";

const path = require("path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const PROTO = path.join(__dirname, "..", "..", "proto", "recinfer", "v1", "inference.proto");
const definition = loader.loadSync(PROTO, { keepCase: true, longs: Number, defaults: true });
const { Inference } = grpc.loadPackageDefinition(definition).recinfer.v1;

// Ids, lengths and numbers travel as raw little-endian bytes. A DataView writes them so on every machine.
function bytes(values, size, write) {
  const view = new DataView(new ArrayBuffer(values.length * size));
  values.forEach((value, i) => write(view, i * size, value));
  return Buffer.from(view.buffer);
}
const int32 = (values) => bytes(values, 4, (view, at, value) => view.setInt32(at, value, true));
const int64 = (values) => bytes(values, 8, (view, at, value) => view.setBigInt64(at, BigInt(value), true));
const float32 = (values) => bytes(values, 4, (view, at, value) => view.setFloat32(at, value, true));
function floats(buffer) {
  const view = new DataView(buffer.buffer, buffer.byteOffset, buffer.byteLength);
  return Array.from({ length: buffer.byteLength / 4 }, (_, i) => view.getFloat32(i * 4, true));
}

// {"user": [[3, 9], [1]], "item": [[5], []]} as JaggedFeatures: all lists of the first feature, then all of the second.
function jagged(features) {
  const keys = Object.keys(features);
  const bags = keys.flatMap((key) => features[key]);
  return {
    keys,
    batch_size: features[keys[0]].length,
    lengths: int32(bags.map((bag) => bag.length)),
    values: int64(bags.flat()),
  };
}

// The pooled embeddings of a LookupResponse: [batch_size, sum(dims)], cut into one block a feature.
function embeddings(answer) {
  const all = floats(answer.values);
  const width = answer.dims.reduce((sum, dim) => sum + dim, 0);
  const found = {};
  let start = 0;
  answer.keys.forEach((key, k) => {
    const from = start;
    found[key] = Array.from({ length: answer.batch_size }, (_, row) =>
      all.slice(row * width + from, row * width + from + answer.dims[k]));
    start += answer.dims[k];
  });
  return found;
}

function outputs(answer) {
  return Object.fromEntries(answer.outputs.map((one) => [one.name, { shape: one.shape, values: floats(one.values) }]));
}

const [target, features, dense] = process.argv.slice(2);
if (!features) {
  console.error("usage: node client.js HOST:PORT FEATURES [DENSE]   (see the head of this file)");
  process.exit(2);
}
const client = new Inference(target, grpc.credentials.createInsecure());
const deadline = Date.now() + 10_000;
function done(error, answer, read) {
  client.close();
  if (error) {
    console.error(`${grpc.status[error.code]}: ${error.details}`);
    process.exit(1);
  }
  console.log(JSON.stringify({ model_version: answer.model_version, ...read }));
}
const request = { features: jagged(JSON.parse(features)) };
if (dense === undefined) {
  client.Lookup(request, { deadline }, (error, answer) =>
    done(error, answer, error ? {} : { embeddings: embeddings(answer) }));
} else {
  client.Predict({ ...request, dense: float32(JSON.parse(dense).flat()) }, { deadline }, (error, answer) =>
    done(error, answer, error ? {} : { outputs: outputs(answer) }));
}
