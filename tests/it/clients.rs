//! Real clients, unchanged, with nothing but the environment that `paceline env` prints. Each is driven by a small
//! script that speaks one protocol (`py/protocol.py`), so that all are held to the same claims.

/// A module of tests for one program, a test for each claim.
macro_rules! held_to_all_claims {
    ($($(#[$doc:meta])* $name:ident: $program:expr;)*) => {$(
        $(#[$doc])*
        mod $name {
            #[allow(unused_imports)]
            use super::*;
            use crate::clients::{claims, scene::Program};

            const PROGRAM: Program = $program;

            #[test]
            fn each_of_its_requests_is_paced() {
                claims::paces_each_request(&PROGRAM);
            }

            #[test]
            fn its_uploads_arrive_whole() {
                claims::uploads_whole(&PROGRAM);
            }

            #[test]
            fn it_waits_four_seconds_in_the_queue() {
                claims::waits_four_seconds(&PROGRAM);
            }

            #[test]
            fn it_sees_a_refusal_with_its_retry_after_and_is_not_confused_by_hints() {
                claims::sees_refusals_and_not_hints(&PROGRAM);
            }

            #[test]
            fn killed_in_the_queue_it_takes_no_slot() {
                claims::killed_in_the_queue_is_never_sent(&PROGRAM);
            }

            #[test]
            fn without_the_ca_it_gets_nothing() {
                claims::is_rejected_without_the_ca(&PROGRAM);
            }

            #[test]
            fn no_failure_makes_it_storm() {
                claims::does_not_storm(&PROGRAM);
            }
        }
    )*};
}
mod claims;
mod curl;
#[cfg(feature = "extended")]
mod extended;
mod git;
mod node;
mod python;
mod scene;
mod wget;
