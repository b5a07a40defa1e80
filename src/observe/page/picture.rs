//! What an event shows: all observed flows, as JSON.
//!
//! ```json
//! {"controls": false, "flows": [{"id": 7, "name": "shout", "over": false, "state": "running", "elapsed": 12.4,
//!   "operators": 10000, "at": "upper", "snapshot": {}}]}
//! ```
//!
//! A flow that has ended has no snapshot in an event, as it does not change: it is fetched by its id. `snapshot` is a
//! [`Snapshot`]. If `operators`, their number, is larger than that of `snapshot`, those are groups. `at` is the operator,
//! hub or group where the bottleneck is.

use std::sync::Arc;

use hyper::body::Bytes;
use serde::Serialize;

use super::{
    super::{FlowState, Snapshot, observer::ObservedFlows, records::Records},
    groups::grouped,
};
use crate::sync::lock;

#[derive(Serialize)]
struct Picture {
    controls: bool,
    flows: Vec<FlowPicture>,
}

#[derive(Serialize)]
struct FlowPicture {
    id: u64,
    name: Arc<str>,
    over: bool,
    state: FlowState,
    elapsed: f64,
    operators: usize,
    at: Option<Arc<str>>,
    snapshot: Option<Snapshot>,
}

impl FlowPicture {
    /// `None` if the run was cut off.
    fn of(records: &Records) -> Option<Self> {
        match records.last() {
            Some(last) => Some(Self::brief(records.number, &last)),
            None => records.snapshot().map(|snapshot| Self::whole(records.number, snapshot)),
        }
    }

    fn brief(id: u64, snapshot: &Snapshot) -> Self {
        Self {
            id,
            name: snapshot.flow.clone(),
            over: snapshot.over,
            state: snapshot.state,
            elapsed: snapshot.elapsed.as_secs_f64(),
            operators: snapshot.operators.len(),
            at: snapshot.bottleneck.as_ref().map(|bottleneck| bottleneck.at.clone()),
            snapshot: None,
        }
    }

    fn whole(id: u64, snapshot: Snapshot) -> Self {
        let brief = Self::brief(id, &snapshot);
        let (snapshot, at) = grouped(snapshot, brief.at);
        Self { at, snapshot: Some(snapshot), ..brief }
    }
}

pub(super) fn records(flows: &ObservedFlows) -> Vec<Arc<Records>> {
    lock(&flows.flows).clone()
}

/// The observed run with this number.
pub(super) fn by_id(flows: &ObservedFlows, id: u64) -> Option<Arc<Records>> {
    records(flows).into_iter().find(|records| records.number == id)
}

/// All flows.
pub(super) fn of_all(flows: &ObservedFlows, controls: bool) -> Option<Bytes> {
    let flows = records(flows).iter().filter_map(|records| FlowPicture::of(records)).collect();
    json(&Picture { controls, flows })
}

/// One flow, also one that has ended.
pub(super) fn of_one(flows: &ObservedFlows, id: u64) -> Option<Bytes> {
    let snapshot = by_id(flows, id)?.snapshot()?;
    json(&FlowPicture::whole(id, snapshot))
}

fn json(value: &impl Serialize) -> Option<Bytes> {
    serde_json::to_vec(value).ok().map(Bytes::from)
}
